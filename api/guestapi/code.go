package guestapi

// Codes of Error: the closed set that both ends know. The host treats any
// other as a protocol error.
const (
	CodeInvalid          = "invalid"            // 400: the request can never succeed as sent
	CodeNoSuchProcess    = "no_such_process"    // 404: unknown or forgotten id
	CodeProcessEnded     = "process_ended"      // 409: the call needs a running process
	CodeProcessRunning   = "process_running"    // 409: only an ended process can be forgotten
	CodeNoTerminal       = "no_terminal"        // 409: resize of a process without PTY
	CodeStdinAhead       = "stdin_offset_ahead" // 409: body also has StdinReply
	CodeOffsetAhead      = "offset_ahead"       // 409: output or acknowledgement past Next
	CodeTooManyProcesses = "too_many_processes" // 503: MaxProcesses known and none may be evicted

	// Start failures, 422: no process exists and none existed.
	CodeStartFailed   = "start_failed"   // any other reason
	CodeNotExecutable = "not_executable" // the program is there but may not be run, or is of no known format
	CodeNotFound      = "not_found"      // the program (Start) or file (files) does not exist
	CodeNoSuchUser    = "no_such_user"   // also for files
	CodeBadCwd        = "bad_cwd"        // working directory missing, or not open to the user
	CodeProcessLimit  = "process_limit"  // the machine's process limit is reached; retry later
	CodeArgsTooLong   = "args_too_long"  // argv and environment exceed what the kernel takes
	CodeNoMemory      = "no_memory"      // the machine has no memory for one more process

	// Files.
	CodeNoSpace          = "no_space"          // 507
	CodePermissionDenied = "permission_denied" // 403
	CodeIsDirectory      = "is_directory"      // 409
	CodeNotRegular       = "not_regular"       // 409: FIFO, device, socket
	CodeIO               = "io_error"          // 500: the guest's disk failed
)
