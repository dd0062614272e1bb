package cli

import (
	"errors"
	"testing"
)

// Text that tenants, guests or a server chose neither moves a terminal's cursor
// nor turns its writing.
func TestTextCannotSteerATerminal(t *testing.T) {
	for in, want := range map[string]string{
		"plain – ünï 漢字 🙂":            "plain – ünï 漢字 🙂",
		"a\x1b[2Jb\x07\x7f":           "a�[2Jb��",
		"two\nlines\ttab\r":           "two�lines�tab�",
		"\u009b31m":                   "�31m",
		"\u202eabc\u202b\u2068\u200f": "�abc���",
		"\u2028x\u2029":               "�x�",
		"broken \xff utf8":            "broken � utf8",
	} {
		if got := clean(in); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
	if got := Message(errors.New("one\x1b]0;x\ntwo")); got != "one�]0;x\ntwo" {
		t.Errorf("message %q", got)
	}
}
