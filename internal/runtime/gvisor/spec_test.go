package gvisor

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const goldenID = sandbox.ID("iaaaaaaaaaaaaaaaaaaa")

var goldenPaths = paths{data: "/data", run: "/run/space/host"}

func goldenSpec() runtime.Spec {
	return runtime.Spec{ID: goldenID, TemplateDigest: "sha256:" + strings.Repeat("a", 64), Resources: sandbox.Resources{
		MilliCPU: 1500, MemoryBytes: 512 << 20, DiskBytes: 1 << 30, MaxProcesses: 256,
	}}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s changed; see that it should, then run with -update.\ngot:\n%s", file, got)
	}
}

// The whole argument list of every command is pinned.
func TestArguments(t *testing.T) {
	var b bytes.Buffer
	for _, v := range []verb{verbRun, verbPause, verbResume, verbState} {
		b.WriteString("# " + string(v) + "\n" + strings.Join(goldenPaths.arguments(v, goldenID), "\n") + "\n")
	}
	golden(t, "arguments.golden", b.Bytes())
}

func goldenBundle(v2 bool) bundle {
	return bundle{
		root: goldenPaths.rootfs(goldenID), netns: goldenPaths.netns(goldenID), channel: goldenPaths.channel(goldenID),
		daemon: "/data/guest", cgroup: "/space/" + string(goldenID), v2: v2, swap: true,
	}
}

// The document is pinned for both kinds of control groups.
func TestDocument(t *testing.T) {
	for _, v2 := range []bool{false, true} {
		doc := ociDocument(goldenSpec(), goldenBundle(v2))
		b, err := json.MarshalIndent(doc, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		golden(t, map[bool]string{false: "document-v1.golden", true: "document-v2.golden"}[v2], append(b, '\n'))
		if doc.Linux.Resources.Unified != nil != v2 {
			t.Error("runsc refuses unified keys on version 1, and needs them on version 2")
		}
		if len(doc.Process.Env) != 0 {
			t.Error("a document has an environment")
		}
	}
}

// What a restore compares is the same for every machine: arguments, and mounts
// but for their sources on the host.
func TestDocumentConstants(t *testing.T) {
	one, two := goldenSpec(), goldenSpec()
	two.ID, two.Resources.MilliCPU, two.Resources.MaxProcesses = "ibbbbbbbbbbbbbbbbbbb", 100, 9
	a, b := ociDocument(one, goldenBundle(false)), ociDocument(two, bundle{root: "/x", netns: "/y", channel: "/z", daemon: "/d", cgroup: "/c/d"})
	for i := range a.Mounts {
		a.Mounts[i].Source, b.Mounts[i].Source = "", ""
	}
	if !reflect.DeepEqual(a.Mounts, b.Mounts) || !reflect.DeepEqual(a.Process.Args, b.Process.Args) {
		t.Error("mounts or arguments depend on the machine")
	}
	if j, _ := json.Marshal([]any{a.Mounts, a.Process.Args}); bytes.Contains(j, []byte(goldenID)) {
		t.Errorf("the id is in %s", j)
	}
}

func TestPathsFit(t *testing.T) {
	if err := goldenPaths.check(); err != nil {
		t.Error(err)
	}
	for _, run := range []string{"/" + strings.Repeat("x", 60), "relative", "/with space", "/with,comma", "/with:colon"} {
		if (paths{data: "/data", run: run}).check() == nil {
			t.Errorf("%q is accepted", run)
		}
	}
}

func TestValid(t *testing.T) {
	if err := Valid(goldenSpec()); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*runtime.Spec){
		"id":        func(s *runtime.Spec) { s.ID = "../../etc" },
		"template":  func(s *runtime.Spec) { s.TemplateDigest = "base:latest" },
		"cpu":       func(s *runtime.Spec) { s.Resources.MilliCPU = 0 },
		"memory":    func(s *runtime.Spec) { s.Resources.MemoryBytes = 1 << 20 },
		"disk":      func(s *runtime.Spec) { s.Resources.DiskBytes = 1 << 60 },
		"processes": func(s *runtime.Spec) { s.Resources.MaxProcesses = -1 },
	} {
		s := goldenSpec()
		change(&s)
		if Valid(s) == nil {
			t.Errorf("a bad %s is accepted", name)
		}
	}
}

func TestParseStat(t *testing.T) {
	const rest = " Z 1 10 10 0 -1 4228364 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 9"
	st, err := parseStat("10 (a) R (b)" + rest)
	if err != nil || st.ticks != 4711 || !st.ended || st.exit != 9 {
		t.Errorf("%+v %v", st, err)
	}
	for _, bad := range []string{"", "10 (x)", "10 (x) R 1 2 3"} {
		if _, err := parseStat(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// A record that cannot be understood is found, and nothing of it is believed.
func TestDamagedRecord(t *testing.T) {
	p := paths{data: t.TempDir(), run: "/run"}
	if err := os.MkdirAll(p.keep(goldenID), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"", "{", `{"version":99,"spec":{"id":"` + string(goldenID) + `"}}`, `{"version":1,"spec":{"id":"ibbbbbbbbbbbbbbbbbbb"}}`} {
		if err := os.WriteFile(p.record(goldenID), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		rec, err := p.load(goldenID)
		if err != nil || !rec.damaged || rec.Spec.ID != goldenID || rec.status().Condition != runtime.Created {
			t.Errorf("%q: %+v %v", text, rec, err)
		}
	}
}
