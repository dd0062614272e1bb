module github.com/space-platform/space

go 1.26
