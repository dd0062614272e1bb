package node

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/space-platform/space/internal/sandbox"
)

// metrics of a node. Labels come from closed sets: no ids, no tenants.
type metrics struct {
	outcomes, deaths, adopted *prometheus.CounterVec
	steps                     *prometheus.HistogramVec
}

func newMetrics() *metrics {
	return &metrics{
		outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "space_node_outcomes_total",
			Help: "Moves that the node made by itself."}, []string{"trigger"}),
		deaths: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "space_node_machine_deaths_total",
			Help: "Machines that ended without being asked to."}, []string{"cause"}),
		adopted: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "space_node_adoptions_total",
			Help: "What was found at start-up."}, []string{"result"}),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "space_node_step_seconds",
			Help:    "Time of one step of a sandbox.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 12)}, []string{"step", "result"}),
	}
}

func (m *metrics) register(r prometheus.Registerer, n *Node) error {
	for _, c := range []prometheus.Collector{m.outcomes, m.deaths, m.adopted, m.steps, &stateCollector{n: n,
		states: prometheus.NewDesc("space_node_sandboxes", "Sandboxes by observed state.", []string{"state"}, nil),
		used:   prometheus.NewDesc("space_node_used", "Resources that sandboxes take.", []string{"resource"}, nil)}} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}

func (m *metrics) outcome(trigger string) { m.outcomes.WithLabelValues(trigger).Inc() }
func (m *metrics) died(cause string)      { m.deaths.WithLabelValues(cause).Inc() }
func (m *metrics) step(s step, took time.Duration, err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.steps.WithLabelValues(string(s), result).Observe(took.Seconds())
}

// stateCollector counts at scrape time.
type stateCollector struct {
	n            *Node
	states, used *prometheus.Desc
}

func (c *stateCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.states; ch <- c.used }

func (c *stateCollector) Collect(ch chan<- prometheus.Metric) {
	counts := map[sandbox.State]int{}
	for _, b := range c.n.all() {
		b.mu.Lock()
		if !b.gone {
			counts[b.row.observed()]++
		}
		b.mu.Unlock()
	}
	for s, v := range counts {
		ch <- prometheus.MustNewConstMetric(c.states, prometheus.GaugeValue, float64(v), string(s))
	}
	used, _ := c.n.ledger.totals()
	for name, v := range map[string]int64{"milli_cpu": used.milliCPU, "memory_bytes": used.memory, "disk_bytes": used.disk} {
		ch <- prometheus.MustNewConstMetric(c.used, prometheus.GaugeValue, float64(v), name)
	}
}
