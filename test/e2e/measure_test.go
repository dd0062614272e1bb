package e2e

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// number is the first number in a text such as "VmRSS: 123 kB".
func number(t testing.TB, text string) int64 {
	t.Helper()
	for _, f := range strings.Fields(text) {
		if n, err := strconv.ParseInt(f, 10, 64); err == nil {
			return n
		}
	}
	t.Fatalf("no number in %q", text)
	return 0
}

// resident is the memory of a process, in bytes.
func resident(t testing.TB, pid int) int64 {
	t.Helper()
	n := residentOr0(pid)
	if n == 0 {
		t.Fatalf("process %d is gone", pid)
	}
	return n
}

func residentOr0(pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	f := strings.Fields(string(b))
	if len(f) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(f[1], 10, 64) // the kernel's own number
	return pages * int64(os.Getpagesize())
}
