"""Layers with states on kvedge's kernels: the same text, one model alone changed, and undone."""

import copy
import importlib
import pickle
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import KvedgeCache, prompt, tiny_model, torch, transformers
from tiny_structures import structure_of

from kvedge.errors import (
    InvalidArgumentError,
    KvedgeError,
    LayoutError,
    NonFiniteInputError,
    ShapeMismatchError,
)
from kvedge.transformers import accelerate, cache_argument, enable_drafts
from kvedge.transformers.steps import STEPS, Unserved

DynamicCache = transformers.DynamicCache
pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="transformers 4 has its steps within the layers"
)
GATED = ["Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText", "OlmoHybrid"]
KDA = ["KimiLinear", "BailingHybrid"]
MAMBA = ["GraniteMoeHybrid", "Bamba", "FalconH1", "NemotronH", "Mamba2", "Zamba2"]
CONV = ["Lfm2", "Lfm2Moe", "Lfm3"]
FAMILIES = [*GATED, *KDA, *MAMBA, *CONV]
EACH = ["Qwen3_5Text", "KimiLinear", "GraniteMoeHybrid", "Lfm2"]  # one of each kind
# The same where torch itself takes up to a minute for KimiLinear, whose steps other tests compare.
SLOWLY = [pytest.param(x, marks=pytest.mark.slow if x == "KimiLinear" else ()) for x in EACH]
FUNCTIONS = {
    "Qwen3_5Text": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "KimiLinear": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "GraniteMoeHybrid": ("mamba2_chunk_scan", "mamba2_selective_state_update"),
    "Lfm2": (),
}


def written(model, inputs, **options):
    """The text after a prompt, and the logits of each of its tokens."""
    made = model.generate(
        **inputs, max_new_tokens=14, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return made.sequences.tolist(), torch.stack(made.logits)


def forwards(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def assert_close(got, wanted, tolerance=1e-4):
    assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.covering(1)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_that_of_torch(name, padding):
    model, _, _ = structure_of(name)
    inputs = prompt(2, 19, padding=padding)
    text, logits = written(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with accelerate(model) as acceleration:
            assert acceleration.replaced and not acceleration.left
            got, close = written(model, inputs)
    assert not acceleration.fallbacks
    assert got == text
    assert_close(close, logits)


@pytest.mark.parametrize("name", EACH)
def test_kvedge_s_functions_are_those_that_run(name):
    model, _, _ = structure_of(name)
    acceleration = accelerate(model)
    functions = {"causal_conv1d_fn", "causal_conv1d_update", *FUNCTIONS[name]}
    assert {layer.functions for layer in acceleration.replaced} == {tuple(sorted(functions))}
    module = dict(model.named_modules())[acceleration.replaced[0].name]
    torchs = vars(__import__(type(module).__module__, fromlist=["_"]))
    before = {function: torchs[function] for function in functions}
    try:  # torch's own may not be called: names are looked up when the layer runs
        torchs.update(dict.fromkeys(functions))
        written(model, prompt(1))
    finally:
        torchs.update(before)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_in_chunks_and_single_tokens_has_torch_s_logits(name):
    model, _, _ = structure_of(name)
    ids = prompt(2, 40)["input_ids"]

    def logits():
        cache = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
        parts = ((0, 17), (17, 18), (18, 19), (19, 35), (35, 40))
        with torch.no_grad():
            return torch.cat([model(ids[:, i:j], **cache).logits for i, j in parts], 1)

    wanted = logits()
    accelerate(model)
    assert_close(logits(), wanted)


@pytest.mark.parametrize("name", SLOWLY)
def test_one_model_alone_is_changed_and_restore_undoes_it(name):
    model, _, _ = structure_of(name)
    other = copy.deepcopy(model)
    forward = type(model).forward
    _, logits = written(model, prompt(1))
    acceleration = accelerate(model)
    assert forwards(model) == [layer.name for layer in acceleration.replaced]
    assert not forwards(other) and type(other).forward is forward
    assert torch.equal(written(other, prompt(1))[1], logits)
    acceleration.restore()
    assert not forwards(model)
    assert torch.equal(written(model, prompt(1))[1], logits)
    acceleration.restore()  # once more changes nothing


def test_a_model_can_be_accelerated_again_copied_and_pickled():
    model, _, _ = structure_of("Qwen3_5Text")
    _, logits = written(model, prompt(1))
    first = accelerate(model, num_threads=1)
    _, fast = written(model, prompt(1))
    other = copy.deepcopy(model)
    second = accelerate(model, num_threads=2)
    first.restore()  # its layers are the second's now
    assert forwards(model) == [layer.name for layer in second.replaced]
    assert torch.equal(written(model, prompt(1))[1], fast)  # threads change no bit
    second.restore()
    assert torch.equal(written(model, prompt(1))[1], logits)
    assert torch.equal(written(other, prompt(1))[1], fast)  # the copy's are its own
    accelerate(other).restore()
    assert torch.equal(written(other, prompt(1))[1], logits)
    accelerate(other)
    plain = pickle.loads(pickle.dumps(other))
    assert torch.equal(written(plain, prompt(1))[1], logits)
    assert accelerate(plain)


def test_what_was_put_on_top_is_to_be_undone_first():
    model, _, _ = structure_of("Lfm2")
    acceleration = accelerate(model)
    module = dict(model.named_modules())[acceleration.replaced[-1].name]
    ours = module.forward
    module.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(KvedgeError, match="forward of a Lfm2ShortConv was replaced after"):
        acceleration.restore()
    assert forwards(model) == [layer.name for layer in acceleration.replaced]
    again = accelerate(model)
    assert [layer.reason for layer in again.left] == [
        "its forward was replaced already, by something else"
    ]
    module.forward = ours
    again.restore()
    acceleration.restore()
    assert not forwards(model)


@pytest.mark.parametrize("name", EACH)
def test_checkpoints_crops_and_saved_conversations_hold_the_same_states(name, tmp_path):
    model, _, _ = structure_of(name)
    model.set_attn_implementation("kvedge")
    accelerate(model)
    ids = prompt(1, 60)["input_ids"]

    def step(cache, part):
        with torch.no_grad():
            return model(part, **{cache_argument(model): cache}).logits[:, -1]

    cache, never = (KvedgeCache(model.config, dtype="float32") for _ in range(2))
    for each in (cache, never):
        step(each, ids[:, :30])
        step(each, ids[:, 30:31])
    cache.checkpoint()
    held = copy.deepcopy([vars(layer) for layer in never.layers if hasattr(layer, "conv_states")])
    step(cache, ids[:, 31:32])
    step(cache, ids[:, 32:50])
    cache.crop(31 - 50)
    for layer, kept in zip(
        [layer for layer in cache.layers if hasattr(layer, "conv_states")], held, strict=True
    ):
        for states in ("conv_states", "recurrent_states"):
            for i, state in kept[states].items():
                got = getattr(layer, states)[i]
                assert state is None or torch.equal(got, state)
    cache.token_ids = ids[:, :31]
    path = tmp_path / "conversation.safetensors"
    cache.save(path)
    loaded = KvedgeCache.load(path, model)
    for start, stop in ((31, 32), (32, 50)):
        wanted = step(never, ids[:, start:stop])
        assert torch.equal(step(cache, ids[:, start:stop]), wanted)
        assert torch.equal(step(loaded, ids[:, start:stop]), wanted)


DRAFTS = {"prompt_lookup_num_tokens": 3}  # transformers refuses them where there is a state to lose


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {"num_beams": 3}) for name in EACH if name != "KimiLinear"), ("Lfm2", DRAFTS)],
    ids=str,
)
def test_beams_and_drafts_write_the_same_text(name, options):
    model, _, _ = structure_of(name)
    batch = 1 if options is DRAFTS else 2
    inputs = {k: torch.cat([t, t], 1) for k, t in prompt(batch, 12).items()}  # something to look up
    wanted, _ = written(model, inputs, **options)
    accelerate(model)
    assert written(model, inputs, **options)[0] == wanted


@pytest.mark.parametrize("name", EACH)
def test_drafts_on_a_kvedge_cache_write_the_same_text(name):
    model, _, _ = structure_of(name)
    model.set_attn_implementation("kvedge")
    inputs = {k: torch.cat([t, t], 1) for k, t in prompt(1, 12).items()}
    wanted, _ = written(model, inputs)
    accelerate(model)
    enable_drafts(model)
    cache = {cache_argument(model): KvedgeCache(model.config, dtype="float32")}
    assert written(model, inputs, **DRAFTS, **cache)[0] == wanted


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_models_in_sixteen_bits_run_with_results_near_float32_s(name, dtype):
    model, _, _ = structure_of(name)
    inputs = prompt(2, 19, padding=5)
    half = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        # what rounding the weights costs alone, experts that are chosen otherwise included
        exact = copy.deepcopy(half).float()(**inputs).logits
        plain = half(**inputs).logits
        with accelerate(half) as acceleration:
            got = half(**inputs).logits
            written(half, inputs)
    assert got.dtype == plain.dtype and not acceleration.fallbacks
    seen = inputs["attention_mask"].bool()
    error = (got.float() - exact)[seen].square().mean().sqrt()
    assert error <= 1.5 * (plain.float() - exact)[seen].square().mean().sqrt() + 1e-3


def test_the_state_keeps_its_tensors():
    model, _, _ = structure_of("Qwen3_5Text")
    accelerate(model)
    cache = DynamicCache(config=model.config)
    ids = prompt(1, 20)["input_ids"]
    with torch.no_grad():
        model(ids[:, :10], **{cache_argument(model): cache})
        held = [*cache.layers[0].conv_states.values(), *cache.layers[0].recurrent_states.values()]
        before = [state.clone() for state in held]
        model(ids[:, 10:11], **{cache_argument(model): cache})
        model(ids[:, 11:], **{cache_argument(model): cache})
    now = [*cache.layers[0].conv_states.values(), *cache.layers[0].recurrent_states.values()]
    for state, same, old in zip(held, now, before, strict=True):
        assert state is same and not torch.equal(state, old)


@pytest.mark.parametrize("name", SLOWLY)
def test_gradients_are_torch_s_and_told_of_once(name):
    model, _, _ = structure_of(name)
    model.requires_grad_(True)
    ids = prompt(1, 20)["input_ids"]
    model(ids, labels=ids).loss.backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    acceleration = accelerate(model)
    with pytest.warns(RuntimeWarning, match="gradients are recorded"):
        model(ids, labels=ids).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        model(ids)
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, got, wanted))
    assert any("gradients are recorded" in reason for reason in acceleration.fallbacks)
    calls = dict(acceleration.fallbacks)
    with torch.no_grad():
        model(ids)
    assert acceleration.fallbacks == calls
    assert "gradients are recorded" in str(acceleration)


@pytest.mark.parametrize("name", ["Qwen3_5Text", "Mamba2", "Lfm2"])
def test_what_is_not_served_is_told_and_computed_by_torch(name):
    model, _, _ = structure_of(name)
    model.double()
    inputs = prompt(1, 20)
    with torch.no_grad():
        wanted = model(**inputs).logits
        acceleration = accelerate(model)
        with pytest.warns(RuntimeWarning, match="torch.float64"):
            assert torch.equal(model(**inputs).logits, wanted)
    assert sum(acceleration.fallbacks.values()) >= len(acceleration.replaced)


@pytest.mark.parametrize("name", ["Qwen3_5Text", "Lfm2"])
def test_a_compiled_model_is_as_without(name):
    model, _, _ = structure_of(name)
    inputs = prompt(1, 20)
    with torch.no_grad():
        wanted = model(**inputs, use_cache=False).logits
        accelerate(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        assert_close(compiled(**inputs, use_cache=False).logits, wanted)


def test_other_convolutions_stay_torch_s():
    model, _, _ = structure_of("Qwen3_5Text")
    for module in model.modules():
        if hasattr(module, "activation"):
            module.activation = "gelu"
    inputs = prompt(1, 20)
    wanted, _ = written(model, inputs)
    acceleration = accelerate(model)
    with pytest.warns(RuntimeWarning, match="a convolution with gelu"):
        assert written(model, inputs)[0] == wanted
    assert set(acceleration.fallbacks) == {
        f"causal_conv1d_{kind} of Qwen3_5GatedDeltaNet: a convolution with gelu"
        for kind in ("fn", "update")
    }


def test_what_stays_torch_s_is_named():
    model, _, _ = structure_of("Jamba")
    acceleration = accelerate(model)
    assert {layer.reason.partition(":")[0] for layer in acceleration.left} == {
        "mamba_selective_scan", "mamba_selective_state_update",
    }  # fmt: skip
    assert "no steps of Mamba-1" in str(acceleration)
    model, _, _ = structure_of("MiniMax")
    acceleration = accelerate(model)
    assert not acceleration and len(acceleration.left) == 2
    assert str(acceleration).splitlines() == [
        "MiniMaxForCausalLM: no layer changed",
        "torch's still",
        "  2 x MiniMaxLightningAttention: the code of its step is its own",
    ]


def test_functions_that_only_have_the_name_are_left_alone(monkeypatch):
    model, _, _ = structure_of("Qwen3_5Text")
    module = type(model.model.layers[0].linear_attn).__module__
    plain = __import__(module, fromlist=["_"]).causal_conv1d_fn

    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        return 2 * plain(hidden_states, weight, bias, activation, **kwargs)

    monkeypatch.setattr(f"{module}.causal_conv1d_fn", causal_conv1d_fn)
    wanted = written(model, prompt(1))[0]
    acceleration = accelerate(model)
    assert {layer.reason for layer in acceleration.left} == {
        "causal_conv1d_fn is a function of its own"
    }
    assert written(model, prompt(1))[0] == wanted


def test_a_model_without_states_is_left_alone():
    model = tiny_model("llama")
    acceleration = accelerate(model)
    assert not acceleration and not acceleration.left and not forwards(model)
    assert str(acceleration) == "LlamaForCausalLM: no layer changed"


def test_bad_arguments_are_refused():
    model, _, _ = structure_of("Lfm2")
    with pytest.raises(InvalidArgumentError, match="model must be"):
        accelerate("Qwen/Qwen3.5-0.8B")
    with pytest.raises(InvalidArgumentError, match="num_threads"):
        accelerate(model, num_threads=0)
    assert not forwards(model)


@pytest.mark.parametrize("name", EACH)
def test_a_model_that_computes_nan_does_so_still(name):
    model, _, _ = structure_of(name)
    accelerate(model)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy computes it, C hands it to torch
        embeddings = model.get_input_embeddings()(prompt(1, 20)["input_ids"])
        embeddings[0, 7] = float("nan")
        assert model(inputs_embeds=embeddings).logits[0, 7:].isnan().all()


def test_functions_that_a_layer_has_as_attributes_are_replaced_too():
    # as in earlier versions of transformers 5
    models = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    plain = models.torch_recurrent_gated_delta_rule

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent_gated_delta_rule = plain
            self.causal_conv1d_fn = None

        def forward(self, *args, **options):
            assert self.causal_conv1d_fn is None
            return self.recurrent_gated_delta_rule(*args, output_final_state=True, **options)

    layer = Layer()
    rows = torch.randn(3, 1, 5, 4, 16)
    accelerate(layer)
    second = accelerate(layer)
    assert [layer.functions for layer in second.replaced] == [("recurrent_gated_delta_rule",)]
    assert [layer.reason.partition(":")[0] for layer in second.left] == ["causal_conv1d_fn"]
    assert layer.recurrent_gated_delta_rule is not plain
    given = {"g": -torch.rand(1, 5, 4), "beta": torch.full((1, 5, 4), 0.5)}
    for got, wanted in zip(
        layer(*rows, **given), plain(*rows, output_final_state=True, **given), strict=True
    ):
        assert_close(got, wanted)
    second.restore()
    assert layer.recurrent_gated_delta_rule is plain and not forwards(layer)


@pytest.mark.parametrize("make", [KvedgeCache, lambda config: DynamicCache(config=config)])
@pytest.mark.parametrize("name", [*EACH, "Mamba2"])
def test_another_batch_than_the_cache_s_is_refused_as_by_transformers(name, make):
    model, _, _ = structure_of(name)
    argument = "cache_params" if name == "Mamba2" else "past_key_values"
    first, later = prompt(3, 9)["input_ids"], prompt(3, 3, seed=1)["input_ids"]

    @torch.no_grad()
    def filled():
        cache = make(model.config)
        model(first, use_cache=True, **{argument: cache})
        return cache

    def step(ids, cache):
        with torch.no_grad():
            return model(ids, use_cache=True, **{argument: cache}).logits

    with accelerate(model) as acceleration:
        cache, wanted = filled(), step(later[:, :1], filled())
        for rows in (1, 2, 6):
            for tokens in (1, 3):
                other = prompt(rows, tokens, seed=2)["input_ids"]
                with pytest.raises(
                    RuntimeError, match=rf"size 3 .* size {rows} |\(3, .*\({rows}, "
                ):
                    step(other, cache)
        assert torch.equal(step(later[:, :1], cache), wanted)
    assert acceleration.replaced and not acceleration.fallbacks


def arguments_of(name, batch, tokens, dtype):
    """A function of transformers, tensors that fit together, and its other arguments."""
    heads, shared, one, two = 4, 2, 16, 24

    def normal(*shape):
        return torch.randn(shape, dtype=dtype)

    if name in ("causal_conv1d_update", "causal_conv1d_fn"):
        tensors = {
            "hidden_states": normal(batch, one, tokens),
            "weight": normal(one, 4),
            "bias": normal(one),
        }
        if name == "causal_conv1d_update":
            tensors["conv_state"] = normal(batch, one, 4)
        return "qwen3_5", tensors, {"activation": "silu"}
    if name == "mamba2_selective_state_update":
        tensors = {
            "state": normal(batch, heads, one, two), "hidden_states": normal(batch, heads, one),
            "dt": normal(batch, heads, 1).expand(-1, -1, one), "B": normal(batch, shared, two),
            "A": -normal(heads, 1, 1).abs().expand(-1, one, two), "C": normal(batch, shared, two),
            "D": normal(heads, 1).expand(-1, one), "dt_bias": normal(heads, 1).expand(-1, one),
            "z": normal(batch, heads, one),
        }  # fmt: skip
        return "mamba2", tensors, {"dt_softplus": True}
    if name == "mamba2_chunk_scan":
        tensors = {
            "hidden_states": normal(batch, tokens, heads, one), "dt": normal(batch, tokens, heads),
            "A": -normal(heads).abs(), "B": normal(batch, tokens, shared, two), "D": normal(heads),
            "C": normal(batch, tokens, shared, two), "dt_bias": normal(heads),
            "initial_states": normal(batch, heads, one, two),
        }  # fmt: skip
        return (
            "mamba2",
            tensors,
            {"chunk_size": 8, "dt_softplus": True, "return_final_states": True},
        )
    gate = (batch, tokens, heads, one) if "kimi" in name else (batch, tokens, heads)
    tensors = {
        "query": normal(batch, tokens, heads, one), "key": normal(batch, tokens, heads, one),
        "value": normal(batch, tokens, heads, two), "g": -normal(*gate).abs(),
        "beta": normal(batch, tokens, heads).sigmoid(),
        "initial_state": normal(batch, heads, one, two),
    }  # fmt: skip
    more = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return "kimi_linear" if "kimi" in name else "qwen3_5", tensors, more


CHANGES = {
    "as it is": lambda t, axis: t,
    "strides": lambda t, axis: t.movedim(axis, 0).clone().movedim(0, axis),
    "one less": lambda t, axis: t.narrow(axis, 0, max(t.shape[axis] - 1, 0)),
    "one more": lambda t, axis: torch.cat([t, t.narrow(axis, 0, min(t.shape[axis], 1))], axis),
    "one": lambda t, axis: t.narrow(axis, 0, min(t.shape[axis], 1)),
    "none": lambda t, axis: t.narrow(axis, 0, 0),
    "no axis": lambda t, axis: t.select(axis, 0) if t.shape[axis] else t,
    "an axis": lambda t, axis: t.unsqueeze(axis),
    "turned": lambda t, axis: t.transpose(axis, 0),
    "double": lambda t, axis: t.double(),
    "half": lambda t, axis: t.half(),
    "bfloat16": lambda t, axis: t.bfloat16(),
    "integers": lambda t, axis: t.int(),
    "elsewhere": lambda t, axis: t.to("meta"),
    "a gradient": lambda t, axis: t.clone().requires_grad_(),
    "sparse": lambda t, axis: t.to_sparse(),
}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in STEPS
        if name not in ("recurrent_gated_delta_rule", "chunk_gated_delta_rule")
    ],
)
@given(data=st.data())
def test_any_tensors_are_as_with_torch_s_function_or_change_nothing(name, data):
    batch, tokens = (
        data.draw(st.integers(0, 3)),
        data.draw(st.integers(0, 3) if "scan" not in name else st.integers(1, 9)),
    )
    torch.manual_seed(data.draw(st.integers(0, 99)))
    module, tensors, more = arguments_of(name, batch, tokens, torch.float32)
    changes = st.dictionaries(
        st.sampled_from(sorted(tensors)), st.sampled_from(sorted(CHANGES)), max_size=2
    )
    for key, change in data.draw(changes).items():
        axis = data.draw(st.integers(0, tensors[key].ndim - 1))
        tensors[key] = CHANGES[change](tensors[key], axis)
    before = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    own = {key: tensor.clone() for key, tensor in before.items()}
    served = STEPS[name][0]
    with torch.set_grad_enabled(data.draw(st.booleans())):
        try:
            got = served(1, **tensors, **more)
        except (
            Unserved,
            ShapeMismatchError,
            LayoutError,
            InvalidArgumentError,
            NonFiniteInputError,
            RuntimeError,
        ):
            for key, tensor in tensors.items():
                assert tensor.is_meta or torch.equal(tensor.to_dense(), before[key].to_dense()), key
            return
    torchs = getattr(
        importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name
    )
    torchs = getattr(torchs, "forward", torchs)
    if 0 in (batch, tokens):
        return  # chunks of no tokens are an error of torch's own functions
    try:
        with torch.no_grad():
            wanted = torchs(**own, **more)
    except RuntimeError:  # mixed types in its convolution, no tokens
        return
    for one, other in zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]:
        if one.numel():  # of no tokens torch's convolution gives another shape
            assert_close(one.float(), other.float(), 3e-2)
