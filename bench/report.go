package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// row is one line of the table. Values are in Unit.
type row struct {
	Row      string  `json:"row"`
	Runtime  string  `json:"runtime"`
	Unit     string  `json:"unit"`
	N        int     `json:"n"`
	P50      float64 `json:"p50"`
	P90      float64 `json:"p90"`
	P99      float64 `json:"p99"`
	Floor    string  `json:"floor,omitempty"`
	FloorP50 float64 `json:"floor_p50,omitempty"`
	Ratio    float64 `json:"ratio,omitempty"` // p50 to floor's p50
	Target   string  `json:"target,omitempty"`
	OK       bool    `json:"ok"` // true where there is no target
}

// samples are measurements of one side.
type samples []float64

// time adds how long f takes, in milliseconds.
func (s *samples) time(f func() error) error {
	began := time.Now()
	err := f()
	*s = append(*s, float64(time.Since(began).Nanoseconds())/1e6)
	return err
}

// rate adds how fast f moves bytes, in MB/s.
func (s *samples) rate(bytes int, f func() error) error {
	began := time.Now()
	err := f()
	*s = append(*s, float64(bytes)/1e6/time.Since(began).Seconds())
	return err
}

// quantile is by nearest rank: it never invents a value.
func (s samples) quantile(q float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(len(sorted)-1, max(0, int(math.Ceil(q*float64(len(sorted))))-1))]
}

// target is a bound of a row's ratio, or of its value.
type target struct {
	most, least float64
	ofValue     bool
}

func (t target) String() string {
	of := "x"
	if t.ofValue {
		of = ""
	}
	switch {
	case t.most > 0:
		return fmt.Sprintf("<= %g%s", t.most, of)
	case t.least > 0:
		return fmt.Sprintf(">= %g%s", t.least, of)
	}
	return ""
}

func (t target) met(ratio, value float64) bool {
	v := ratio
	if t.ofValue {
		v = value
	}
	return !math.IsNaN(v) && (t.most == 0 || v <= t.most) && (t.least == 0 || v >= t.least)
}

func (b *bench) add(name, runtimeName, unit string, measured samples, floor string, floorSamples samples, t target) {
	r := row{
		Row: name, Runtime: runtimeName, Unit: unit, N: len(measured),
		P50: measured.quantile(.5), P90: measured.quantile(.9), P99: measured.quantile(.99),
		Floor: floor, Target: t.String(),
	}
	if unit == "MB/s" { // the slow ones are those that count
		r.P90, r.P99 = measured.quantile(.1), measured.quantile(.01)
	}
	if len(floorSamples) > 0 {
		r.FloorP50 = floorSamples.quantile(.5)
		r.Ratio = r.P50 / r.FloorP50
	}
	r.OK = t.met(r.Ratio, r.P50)
	b.rows = append(b.rows, r)
	fmt.Printf("  %s: p50 %.4g %s, floor %.4g, ratio %.2f %s\n", r.Row, r.P50, r.Unit, r.FloorP50, r.Ratio, r.Target)
}

func printTable(w io.Writer, rows []row) {
	t := tabwriter.NewWriter(w, 2, 4, 2, ' ', 0)
	fmt.Fprintln(t, "ROW\tRUNTIME\tUNIT\tN\tP50\tP90\tP99\tFLOOR P50\tRATIO\tTARGET\tOK\tFLOOR")
	num := func(f float64) string {
		if f == 0 {
			return "-"
		}
		return fmt.Sprintf("%.4g", f)
	}
	for _, r := range rows {
		ok := "yes"
		switch {
		case r.Target == "":
			ok = "-"
		case !r.OK:
			ok = "NO"
		}
		ratio := "-"
		if r.Ratio != 0 {
			ratio = fmt.Sprintf("%.2fx", r.Ratio)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Row, r.Runtime, r.Unit, r.N, num(r.P50), num(r.P90), num(r.P99), num(r.FloorP50), ratio, r.Target, ok, r.Floor)
	}
	_ = t.Flush() // a table that cannot be printed is seen
}

// machine is where it was measured.
type machine struct {
	CPU       string `json:"cpu"`
	CPUs      int    `json:"cpus"`
	MemoryMiB int64  `json:"memory_mib"`
	Kernel    string `json:"kernel"`
	Go        string `json:"go"`
}

type report struct {
	Machine machine   `json:"machine"`
	Commit  string    `json:"commit"`
	Date    time.Time `json:"date"`
	Rows    []row     `json:"rows"`
}

func writeReport(path string, rows []row) error {
	r := report{Machine: here(), Commit: commit(), Date: time.Now().UTC().Truncate(time.Second), Rows: rows}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".tmp", append(text, '\n'), 0o644); err != nil {
		return err
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return err
	}
	fmt.Println("bench: wrote", path)
	return nil
}

func here() machine {
	m := machine{CPUs: runtime.NumCPU(), Go: runtime.Version(), MemoryMiB: meminfo("MemTotal") >> 20, CPU: "unknown"}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
				m.CPU = strings.TrimSpace(v)
				break
			}
		}
	}
	if text, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(text))
	}
	return m
}

func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

// meminfo reads one line of /proc/meminfo, in bytes; 0 when it is not there.
func meminfo(name string) int64 {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		var kib int64
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			if _, err := fmt.Sscan(rest, &kib); err == nil {
				return kib << 10
			}
		}
	}
	return 0
}

// profiled writes a CPU profile of f when -pprof asks for it.
func (b *bench) profiled(name string, f func() error) error {
	if b.profile == "" {
		return f()
	}
	out, err := os.Create(filepath.Join(b.profile, name+".pprof"))
	if err != nil {
		return err
	}
	defer out.Close()
	debug.FreeOSMemory()
	if err := pprof.StartCPUProfile(out); err != nil {
		return err
	}
	defer pprof.StopCPUProfile()
	return f()
}
