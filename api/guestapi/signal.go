package guestapi

import (
	"strconv"
	"strings"
)

// signals are Linux's names and numbers on amd64 and arm64.
var signals = [...]string{
	1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
	9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
	16: "SIGSTKFLT", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP", 20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU",
	23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO",
	30: "SIGPWR", 31: "SIGSYS",
}

const maxSignal = 64

// SignalNumber gives the number of a signal written as "SIGTERM", "TERM",
// "term" or "15" (1 to 64; real-time ones by number or as "SIG40"); 0 when it is none.
func SignalNumber(s string) int {
	if len(s) > 16 {
		return 0
	}
	name := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	if n, err := strconv.Atoi(name); err == nil {
		if n < 1 || n > maxSignal {
			return 0
		}
		return n
	}
	for n, known := range signals {
		if known != "" && known[3:] == name {
			return n
		}
	}
	return 0
}

// SignalName gives "SIGTERM" for 15, and "SIG40" for those without a name; ""
// outside 1 to 64.
func SignalName(n int) string {
	switch {
	case n < 1 || n > maxSignal:
		return ""
	case n < len(signals):
		return signals[n]
	}
	return "SIG" + strconv.Itoa(n)
}
