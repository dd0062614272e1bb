package gvisor

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/space-platform/space/internal/runtime"
	"github.com/space-platform/space/internal/sandbox"
)

const recordVersion = 1

// record is machine.json: all that is needed to find a machine again.
type record struct {
	Version int          `json:"version"`
	Spec    runtime.Spec `json:"spec"`
	// Made is set when Create has finished.
	Made bool `json:"made"`
	// Removing is set when Destroy has begun; nothing but Destroy is then allowed.
	Removing bool `json:"removing,omitempty"`
	// BootID is that of the last Start, "" before the first.
	BootID string `json:"boot_id,omitempty"`
	// Boot is the machine's process; nil when it was not started or was stopped.
	Boot *boot `json:"boot,omitempty"`
	// Exit tells how the last boot ended.
	Exit *runtime.Exit `json:"exit,omitempty"`
	// damaged is set for a record that cannot be read: it can only be destroyed.
	damaged bool
}

// boot is one run of the sandbox process.
type boot struct {
	// Host is the boot id of the host's kernel: another one means that every
	// process, mount and namespace of then is gone.
	Host string `json:"host"`
	PID  int    `json:"pid,omitempty"`
	// Ticks is the start time of PID, against a reused number.
	Ticks uint64 `json:"ticks,omitempty"`
	// Started is set when Start has finished.
	Started bool `json:"started,omitempty"`
	Paused  bool `json:"paused,omitempty"`
}

// clone keeps snapshots of a record independent.
func (rec record) clone() record {
	if rec.Boot != nil {
		b := *rec.Boot
		rec.Boot = &b
	}
	if rec.Exit != nil {
		e := *rec.Exit
		rec.Exit = &e
	}
	return rec
}

// resident reports whether a boot was finished and not ended by Stop.
func (rec record) resident() bool { return rec.Made && rec.Boot != nil && rec.Boot.Started }

// status is the record in the words of the contract.
func (rec record) status() runtime.Status {
	st := runtime.Status{Spec: rec.Spec, Condition: runtime.Created, BootID: rec.BootID}
	switch {
	case !rec.resident():
	case rec.Exit != nil:
		e := *rec.Exit
		st.Condition, st.Exit = runtime.Dead, &e
	case rec.Boot.Paused:
		st.Condition = runtime.Paused
	default:
		st.Condition = runtime.Running
	}
	return st
}

func (p paths) save(rec record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("gvisor: record: %w", err)
	}
	return writeFile(p.record(rec.Spec.ID), append(b, '\n'), true)
}

// load reads the record of id. One that cannot be understood is damaged, not
// an error: the machine must still be found and destroyed.
func (p paths) load(id sandbox.ID) (record, error) {
	b, err := os.ReadFile(p.record(id))
	if err != nil {
		return record{}, err
	}
	var rec record
	if err := json.Unmarshal(b, &rec); err != nil || rec.Version != recordVersion || rec.Spec.ID != id {
		return record{Version: recordVersion, Spec: runtime.Spec{ID: id}, damaged: true}, nil
	}
	return rec, nil
}

// procStat is what /proc tells of a process.
type procStat struct {
	ticks uint64 // start, in clock ticks since boot
	ended bool   // it is only waiting to be collected
	exit  int    // its wait status, once ended
}

func readStat(pid int) (procStat, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return procStat{}, err
	}
	return parseStat(string(b))
}

// parseStat reads a line of /proc/PID/stat. The name, in parentheses, may hold
// anything.
func parseStat(line string) (procStat, error) {
	f := strings.Fields(line[strings.LastIndexByte(line, ')')+1:])
	if len(f) < 50 {
		return procStat{}, fmt.Errorf("gvisor: %d fields in a process's status", len(f))
	}
	start, err := strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return procStat{}, fmt.Errorf("gvisor: start time: %w", err)
	}
	exit, err := strconv.Atoi(f[49])
	if err != nil {
		return procStat{}, fmt.Errorf("gvisor: exit status: %w", err)
	}
	return procStat{ticks: start, ended: f[0] == "Z" || f[0] == "X", exit: exit}, nil
}

// ticks gives the start time of a process; 0 when there is none, or it has ended.
func ticks(pid int) uint64 {
	st, err := readStat(pid)
	if err != nil || st.ended {
		return 0
	}
	return st.ticks
}
