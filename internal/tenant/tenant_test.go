package tenant

import (
	"encoding"
	"encoding/json"
	"strings"
	"testing"
)

func TestMint(t *testing.T) {
	for _, name := range []string{"a", "default", "0-a", strings.Repeat("a", 63)} {
		id, err := Mint(name)
		if err != nil || id.String() != name || id.IsZero() {
			t.Errorf("Mint(%q): %v, %v", name, id, err)
		}
		if b, err := json.Marshal(id); err != nil || string(b) != `"`+name+`"` {
			t.Errorf("JSON of %q: %s, %v", name, b, err)
		}
	}
	for _, name := range []string{"", "-a", "A", "a_b", "a b", "a/b", "a\n", "é", strings.Repeat("a", 64)} {
		if id, err := Mint(name); err == nil || !id.IsZero() {
			t.Errorf("Mint(%q) made %v", name, id)
		}
	}
	if !(ID{}).IsZero() {
		t.Error("the zero ID is a tenant")
	}
}

// TestNotFromText: no decoder makes a tenant out of what came in.
func TestNotFromText(t *testing.T) {
	var id ID
	if _, ok := any(&id).(encoding.TextUnmarshaler); ok {
		t.Error("an ID can be decoded from text")
	}
	if _, ok := any(&id).(json.Unmarshaler); ok {
		t.Error("an ID can be decoded from JSON")
	}
	//lint:ignore SA9005 that nothing can be set is what is tested
	if err := json.Unmarshal([]byte(`{"name":"a","Name":"a"}`), &id); err == nil && !id.IsZero() {
		t.Error("JSON made a tenant")
	}
}
