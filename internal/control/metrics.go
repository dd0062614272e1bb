package control

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/space-platform/space/internal/operation"
	"github.com/space-platform/space/internal/sandbox"
)

type metrics struct {
	intents  *prometheus.HistogramVec // by verb
	ends     *prometheus.HistogramVec // by kind and state
	passes   *prometheus.HistogramVec // by result
	lag      prometheus.Gauge
	outcomes *prometheus.CounterVec
	orphans  prometheus.Counter
	denied   *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	fine := prometheus.ExponentialBuckets(0.0005, 2, 18)
	m := &metrics{
		intents: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "space_control_intent_seconds", Help: "Time from a mutation's arrival to its durable intent.", Buckets: fine}, []string{"verb"}),
		ends: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "space_control_operation_seconds", Help: "Life of ended operations.", Buckets: fine}, []string{"kind", "state"}),
		passes: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "space_control_reconcile_seconds", Help: "Duration of one reconciliation of one sandbox.", Buckets: fine}, []string{"result"}),
		lag: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "space_control_unsettled_sandboxes", Help: "Sandboxes not yet converged at the last periodic pass."}),
		outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "space_control_outcomes_total", Help: "Node outcomes absorbed."}, []string{"trigger", "state"}),
		orphans: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "space_control_orphans_total", Help: "Machines of no living record that were ordered deleted."}),
		denied: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "space_control_denied_total", Help: "Requests refused for a missing scope."}, []string{"action"}),
	}
	if r == nil {
		return m, nil
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.intents, m.ends, m.passes, m.lag, m.outcomes, m.orphans, m.denied} {
		errs = append(errs, r.Register(c))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("control: metrics: %w", err)
	}
	return m, nil
}

func (m *metrics) intent(v sandbox.Verb, d time.Duration) {
	m.intents.WithLabelValues(string(v)).Observe(d.Seconds())
}

func (m *metrics) ended(o operation.Operation) {
	m.ends.WithLabelValues(string(o.Kind), string(o.State)).Observe(o.UpdatedAt.Sub(o.CreatedAt).Seconds())
}
