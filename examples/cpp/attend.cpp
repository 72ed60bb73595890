// kvedge from C++17: a layer that frees itself, a few tokens, and attention to them.
//
//   c++ -std=c++17 -O2 attend.cpp -o attend $(pkg-config --cflags --libs kvedge)
//   ./attend
#include <kvedge.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <vector>

namespace {

void check(kvedge_status status) {
  if (status != KVEDGE_OK) throw std::runtime_error(kvedge_strerror(status));
}

struct Destroy {
  void operator()(kvedge_layer *layer) const { kvedge_layer_destroy(layer); }
};
using Layer = std::unique_ptr<kvedge_layer, Destroy>;

Layer make_layer(const kvedge_layer_config &config) {
  kvedge_layer *layer = nullptr;
  check(kvedge_layer_create(&config, NULL, &layer));
  return Layer(layer);
}

} // namespace

int main() {
  constexpr int num_heads = 8, num_kv_heads = 2, head_dim = 64, num_tokens = 100;
  kvedge_layer_config config{};
  config.format = KVEDGE_INT8;
  config.capacity = 4096;
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;
  try {
    const Layer layer = make_layer(config);
    std::vector<float> keys(num_tokens * num_kv_heads * head_dim), values(keys.size());
    for (std::size_t i = 0; i < keys.size(); i++) {
      keys[i] = static_cast<float>(i % 17) / 17.0f;
      values[i] = static_cast<float>(i % head_dim); // each token's value: 0, 1, 2, ...
    }
    check(kvedge_layer_append(layer.get(), keys.data(), values.data(), num_tokens));

    const std::vector<float> query(num_heads * head_dim, 0.1f);
    std::vector<float> out(query.size());
    check(kvedge_attend(layer.get(), query.data(), 1, num_heads, nullptr, 1, out.data(), nullptr));
    std::printf("kvedge %s on %s: %lld tokens; out[0] = %.3f, out[63] = %.3f\n", kvedge_version(), kvedge_isa_name(),
                static_cast<long long>(kvedge_layer_len(layer.get())), static_cast<double>(out[0]),
                static_cast<double>(out[63]));
    return out[63] > 62.5f && out[63] < 63.5f ? 0 : 1;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "attend: %s\n", error.what());
    return 1;
  }
}
