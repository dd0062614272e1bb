package sandbox

import (
	"strings"
	"testing"

	"github.com/space-platform/space/internal/fault"
)

// The whole table, written down a second time: a change of it must be meant.
func TestTransitions(t *testing.T) {
	const no = ""
	want := map[State]string{
		//            pause     resume    suspend     restore   stop      start     wake      delete    update        release
		Running:     "paused    running   suspended   running   stopped   running   running   deleted   running       -",
		Paused:      "paused    running   suspended   -         stopped   -         running   deleted   paused        -",
		Suspended:   "-         -         suspended   running   stopped   -         running   deleted   suspended     -",
		Stopped:     "-         -         -           -         stopped   running   running   deleted   stopped       -",
		Failed:      "-         -         -           -         stopped   running   running   deleted   failed        -",
		Quarantined: "-         -         -           -         -         -         -         deleted   -             stopped",
		Deleted:     "-         -         -           -         -         -         -         deleted   -             -",
	}
	if len(want) != len(SettledStates()) {
		t.Fatalf("%d rows for %d states", len(want), len(SettledStates()))
	}
	for _, s := range SettledStates() {
		row := strings.Fields(want[s])
		if len(row) != len(Verbs()) {
			t.Fatalf("%s: %d columns for %d verbs", s, len(row), len(Verbs()))
		}
		desired, observed := s, s
		if s == Failed || s == Quarantined {
			desired = Running // what it was wanted to be when it went wrong
		}
		for i, v := range Verbs() {
			exp := State(strings.Trim(row[i], "-"))
			got, err := Next(desired, observed, v)
			switch {
			case exp == no && err == nil:
				t.Errorf("%s a %s one: allowed to %s", v, s, got)
			case exp == no && s == Deleted && !fault.IsClass(err, fault.Gone):
				t.Errorf("%s a deleted one: %v", v, err)
			case exp == no && s != Deleted && (!fault.IsCode(err, "state_conflict") || fault.Of(err).Remedy == ""):
				t.Errorf("%s a %s one: %v", v, s, err)
			case exp != no && (err != nil || got != exp):
				t.Errorf("%s a %s one: %s, %v; want %s", v, s, got, err, exp)
			}
		}
	}
}

// Verbs are judged by where a sandbox is going, so that one in transition takes
// them; a wanted deletion beats whatever is observed.
func TestSettled(t *testing.T) {
	for _, c := range []struct{ desired, observed, want State }{
		{Running, Creating, Running}, {Paused, Running, Paused}, {Running, Resuming, Running},
		{Running, Failed, Failed}, {Running, Quarantined, Quarantined}, {Deleted, Failed, Deleted}, {Deleted, Quarantined, Deleted},
	} {
		if got := Settled(c.desired, c.observed); got != c.want {
			t.Errorf("wanted %s, is %s: %s, want %s", c.desired, c.observed, got, c.want)
		}
	}
}

func TestIDs(t *testing.T) {
	seen := map[ID]bool{}
	for range 1000 {
		id := NewID()
		if got, err := ParseID(string(id)); err != nil || got != id || len(id) != IDLen || seen[id] {
			t.Fatalf("%q: %v", id, err)
		}
		seen[id] = true
		s := NewSessionID(id)
		if got, err := ParseSessionID(string(s)); err != nil || got != s || s.Sandbox() != id {
			t.Fatalf("%q: %v", s, err)
		}
	}
}

func FuzzParseIDs(f *testing.F) {
	for _, s := range []string{"", "i", string(NewID()), string(NewSessionID(NewID())), "i" + strings.Repeat("a", 18), "i" + strings.Repeat("a", 20), "../../../../etc/passwd", "i234567890123456789\n", "I234567890123456789a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		clean := func(s string) bool { return !strings.ContainsAny(s, "/\\.\x00\n \t%") }
		if id, err := ParseID(s); err == nil && (string(id) != s || len(s) != IDLen || !clean(s)) {
			t.Errorf("accepted %q", s)
		}
		if id, err := ParseSessionID(s); err == nil {
			if _, err := ParseID(string(id.Sandbox())); string(id) != s || !clean(s) || err != nil {
				t.Errorf("accepted session %q", s)
			}
		}
		_ = SessionID(s).Sandbox() // of anything at all
	})
}
