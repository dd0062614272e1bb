package httpapi

import (
	"encoding/json"
	"strings"
	"testing"
)

// What a program prints does not make the answer many times as large.
func TestOutputIsNotBlownUp(t *testing.T) {
	for text, isText := range map[string]bool{
		"plain\n\ttext <html> & \"quoted\"\r\n": true,
		strings.Repeat("\n", 1000):              true,
		"\x1b[1mbold\x1b[0m and more of it":     true,
		strings.Repeat("\x00", 1000):            false,
		strings.Repeat("a\x01", 1000):           false,
		"\xff":                                  false,
	} {
		o := outputOut([]byte(text), 0)
		b, err := json.Marshal(o)
		if err != nil || (o.Text != nil) != isText || len(b) > 2*len(text)+100 {
			t.Errorf("%.20q: text %v, %d bytes became %d (%v)", text, o.Text != nil, len(text), len(b), err)
		}
	}
}
