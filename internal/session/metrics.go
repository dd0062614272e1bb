package session

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	started prometheus.Counter
	ended   *prometheus.CounterVec
	running prometheus.Gauge
	readers prometheus.Gauge
	bytes   prometheus.Counter
}

// newMetrics makes the metrics and registers them when reg is not nil.
func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		started: prometheus.NewCounter(prometheus.CounterOpts{Name: "space_sessions_started_total", Help: "Sessions whose command was started."}),
		ended:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "space_sessions_ended_total", Help: "Sessions that ended, by cause."}, []string{"cause"}),
		running: prometheus.NewGauge(prometheus.GaugeOpts{Name: "space_sessions_running", Help: "Sessions that are starting or running."}),
		readers: prometheus.NewGauge(prometheus.GaugeOpts{Name: "space_session_readers", Help: "Open output streams."}),
		bytes:   prometheus.NewCounter(prometheus.CounterOpts{Name: "space_session_output_bytes_total", Help: "Bytes of output journalled."}),
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.started, m.ended, m.running, m.readers, m.bytes} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("session: metrics: %w", err)
		}
	}
	return m, nil
}
