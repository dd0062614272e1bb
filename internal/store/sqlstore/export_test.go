package sqlstore

import (
	"context"
	"database/sql"
	"strings"
)

// Trace calls fn with every statement from now on; set it before use.
func (s *Store) Trace(fn func(query string, args []any)) { s.trace = fn }

// Explain gives the database's plan for a statement.
func (s *Store) Explain(ctx context.Context, query string, args []any) (string, error) {
	explain, columns := "EXPLAIN QUERY PLAN ", 4
	if s.o.Dialect.Numbered {
		explain, columns = "EXPLAIN ", 1
	}
	var out strings.Builder
	trace := s.trace
	s.trace = nil
	defer func() { s.trace = trace }()
	err := s.on(s.o.Write).each(ctx, func(rows *sql.Rows) error {
		line := make([]any, columns)
		for i := range line {
			line[i] = new(sql.NullString)
		}
		if err := rows.Scan(line...); err != nil {
			return err
		}
		out.WriteString(line[columns-1].(*sql.NullString).String + "\n")
		return nil
	}, explain+query, args...)
	return out.String(), err
}
