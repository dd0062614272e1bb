#!/bin/sh
# Runs every fuzz test for a while.
#
#   scripts/fuzz.sh [DURATION]     each FuzzXxx for DURATION (default 10s)
set -eu

duration=${1:-10s}
cd "$(dirname "$0")/.."
found=0
for file in $(grep -rl --include='*_test.go' '^func Fuzz[A-Z0-9_]' . | sort); do
	for name in $(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file"); do
		found=$((found + 1))
		echo "fuzz: $(dirname "$file") $name for $duration"
		go test -run '^$' -fuzz "^$name\$" -fuzztime "$duration" "$(dirname "$file")"
	done
done
echo "fuzz: $found fuzz tests passed"
