# What came of one suite: its time, and what pytest and the C programs say at their ends.
#
#   awk -v name=NAME -v status=EXIT_STATUS -f summary.awk TIME LOG      TIME: seconds real, user, system

FNR == NR { real = $1; cpu = $2 + $3; next }

# pytest: "1234 passed, 57 skipped in 200.1s (0:03:20)"
/(passed|failed|skipped|errors?|deselected).* in [0-9.]+s/ {
  for (i = 1; i < NF; i++) {
    word = $(i + 1)
    sub(/,$/, "", word)
    if ($i ~ /^[0-9]+$/ && word ~ /^(passed|failed|skipped|errors?)$/) count[word] += $i
  }
}

# C programs and fuzzing
/^[0-9]+ passed, [0-9]+ failed$/ { count["passed"] += $1; count["failed"] += $3 }

# pytest's short summary: which tests failed, and the first line of why
/^(FAILED|ERROR) [^ ]+\.py/ { broken[$0] = 1 }

# tests/conftest.py
/^[0-9]+ skipped: / { n = $1; sub(/^[0-9]+ skipped: /, ""); reasons[$0] += n }

# tests/c/run.sh: "(clang for aarch64 left out: ...)"
/^\(.* left out: .*\)$/ { left_out[$0] = 1 }

END {
  line = ""
  split("passed failed error errors skipped", words, " ")
  for (i = 1; i in words; i++)
    if (count[words[i]]) line = line (line == "" ? "" : ", ") count[words[i]] " " words[i]
  printf "%s%s: %d s, %d s of CPU%s\n", status ? "FAILED (" status ") " : "", name, real, cpu, line == "" ? "" : ": " line
  for (test in broken) print "    " substr(test, 1, 240)
  for (reason in reasons) printf "    %d skipped: %s\n", reasons[reason], reason
  for (one in left_out) print "    " one
}
