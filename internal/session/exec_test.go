package session

import (
	"testing"
)

func TestC012StdoutAndStderrStayApart(t *testing.T) {
	h := newHost(t, Limits{})
	r := h.exec("echo out; echo err >&2; exit 7")
	if string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" || r.Exit.Cause != CauseExited || r.Exit.Code != 7 {
		t.Fatal(r)
	}
}

func BenchmarkExec(b *testing.B) {
	h := newHost(b, Limits{})
	h.exec("true")
	b.Run("session", func(b *testing.B) {
		for b.Loop() {
			h.execAs(ExecRequest{CreateRequest: CreateRequest{Sandbox: h.box, Command: Command{Args: []string{"/bin/true"}}}})
		}
	})
}
