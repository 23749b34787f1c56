// SPDX-License-Identifier: Apache-2.0

package flashattn

/*
#cgo pkg-config: flashattn
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
)

// Status is a number of flashattn.h. It is an error, to be compared with errors.Is.
type Status int32

// The statuses of flashattn.h: 1xx the call is wrong, 2xx there is no kernel, 3xx the device, 4xx memory or the library.
const (
	ErrInvalidArgument Status = C.FA_ERROR_INVALID_ARGUMENT
	ErrStructVersion   Status = C.FA_ERROR_STRUCT_VERSION
	ErrShape           Status = C.FA_ERROR_SHAPE
	ErrDtype           Status = C.FA_ERROR_DTYPE
	ErrAlignment       Status = C.FA_ERROR_ALIGNMENT
	ErrWorkspace       Status = C.FA_ERROR_WORKSPACE
	ErrBusy            Status = C.FA_ERROR_BUSY
	ErrUnsupported     Status = C.FA_ERROR_UNSUPPORTED
	ErrArch            Status = C.FA_ERROR_ARCH
	ErrNotBuilt        Status = C.FA_ERROR_NOT_BUILT
	ErrNoDevice        Status = C.FA_ERROR_NO_DEVICE
	ErrDriver          Status = C.FA_ERROR_DRIVER
	ErrCUDA            Status = C.FA_ERROR_CUDA
	ErrOutOfMemory     Status = C.FA_ERROR_OUT_OF_MEMORY
	ErrInternal        Status = C.FA_ERROR_INTERNAL
	ErrCallback        Status = C.FA_ERROR_CALLBACK
)

// String is the constant's name in flashattn.h, such as "FA_ERROR_SHAPE".
func (s Status) String() string { return C.GoString(C.fa_status_name(C.fa_status(s))) }

// Error is one sentence about the status.
func (s Status) Error() string { return C.GoString(C.fa_status_description(C.fa_status(s))) }

// Error is a call that the library, or this package, refused or could not complete.
type Error struct {
	Status Status
	Text   string // names the argument and its value
	CUDA   int    // with ErrCUDA: the number of the CUDA error
}

func (e *Error) Error() string { return fmt.Sprintf("flashattn: %s: %s", e.Status.String(), e.Text) }

// Unwrap makes errors.Is(err, flashattn.ErrShape) work.
func (e *Error) Unwrap() error { return e.Status }

var errClosed = errors.New("flashattn: the context is closed")

// CPUISA is an instruction set of the CPU kernels.
type CPUISA int32

// Instruction sets; results differ between them by rounding only.
const (
	ISAAuto       CPUISA = C.FA_CPU_ISA_AUTO
	ISAPortable   CPUISA = C.FA_CPU_ISA_PORTABLE
	ISAAVX2       CPUISA = C.FA_CPU_ISA_AVX2
	ISAAVX512     CPUISA = C.FA_CPU_ISA_AVX512
	ISAAVX512BF16 CPUISA = C.FA_CPU_ISA_AVX512_BF16
	ISAAMX        CPUISA = C.FA_CPU_ISA_AMX
	ISANEON       CPUISA = C.FA_CPU_ISA_NEON
	ISANEONFHM    CPUISA = C.FA_CPU_ISA_NEON_FHM
	ISANEONBF16   CPUISA = C.FA_CPU_ISA_NEON_BF16
	ISASVE256     CPUISA = C.FA_CPU_ISA_SVE256
)

func (isa CPUISA) String() string {
	switch isa {
	case ISAAuto:
		return "auto"
	case ISAPortable:
		return "portable"
	case ISAAVX2:
		return "avx2"
	case ISAAVX512:
		return "avx512"
	case ISAAVX512BF16:
		return "avx512_bf16"
	case ISAAMX:
		return "amx"
	case ISANEON:
		return "neon"
	case ISANEONFHM:
		return "neon_fhm"
	case ISANEONBF16:
		return "neon_bf16"
	case ISASVE256:
		return "sve256"
	}
	return fmt.Sprintf("CPUISA(%d)", int32(isa))
}

// Option is a setting of New.
type Option func(*C.fa_config)

// Threads is how many threads of the CPU a call uses; without it all that the process may use.
func Threads(n int) Option { return func(c *C.fa_config) { c.num_threads = C.int32_t(n) } }

// ISA chooses the instruction set of the CPU; one that this processor lacks is refused with ErrArch.
func ISA(isa CPUISA) Option { return func(c *C.fa_config) { c.cpu_isa = C.fa_cpu_isa(isa) } }

// CUDA makes a context of that GPU instead of the CPU. Its tensors are memory of the device (DeviceOf), and its calls only enqueue work: see
// SetStream. Without such a device New fails with ErrNoDevice, ErrDriver or, in a library without CUDA, ErrNotBuilt.
func CUDA(device int) Option {
	return func(c *C.fa_config) { c.device_type, c.device_index = C.FA_DEVICE_CUDA, C.int32_t(device) }
}

// CUDAArch keeps a CUDA context to kernels that devices of this compute capability (major * 10 + minor, from 80 on) run, too.
func CUDAArch(capability int) Option {
	return func(c *C.fa_config) { c.cuda_arch = C.int32_t(capability) }
}

// Context is a device, the CPU unless the option CUDA says otherwise, with its settings, threads and scratch memory. It serves one goroutine
// at a time (ErrBusy otherwise); contexts are independent of each other.
type Context struct {
	handle    C.fa_context
	cuda      bool
	stream    C.uintptr_t
	workspace Tensor
}

// New creates a context. Close it, or leave that to the garbage collector.
func New(options ...Option) (*Context, error) {
	var config C.fa_config
	C.fa_config_init(&config, C.sizeof_fa_config)
	config.device_type = C.FA_DEVICE_CPU
	for _, option := range options {
		option(&config)
	}
	ctx := new(Context)
	var text [512]C.char
	if status := C.go_create(&ctx.handle, &config, &text[0], C.size_t(len(text))); status != C.FA_OK {
		return nil, &Error{Status: Status(status), Text: C.GoString(&text[0])}
	}
	ctx.cuda = config.device_type == C.FA_DEVICE_CUDA
	runtime.SetFinalizer(ctx, (*Context).Close)
	return ctx, nil
}

// Close ends the context and its threads. Closing twice has no effect.
func (ctx *Context) Close() error {
	if ctx.handle != nil {
		C.fa_destroy(ctx.handle)
		ctx.handle = nil
		runtime.SetFinalizer(ctx, nil)
	}
	return nil
}

// SetStream names the CUDA stream (a cudaStream_t) on which the calls that follow enqueue their work, in its order and without waiting for
// it. A new context has 0, the default stream of the device. The CPU has no streams: calls return when their work is done.
func (ctx *Context) SetStream(stream uintptr) { ctx.stream = C.uintptr_t(stream) }

// SetWorkspace gives the following calls their scratch memory: a one-dimensional uint8 tensor with at least WorkspaceBytes of their Plan, at an
// address that is a multiple of 256. No other call may use it while one of these calls may still run. With the zero Tensor, which a new
// context has, the library allocates the memory.
func (ctx *Context) SetWorkspace(workspace Tensor) error {
	if err := ctx.fill([]named{{"workspace", &workspace, new(C.fa_tensor)}}); err != nil {
		return err
	}
	raw := &workspace.raw
	if !workspace.absent() && (raw.dtype != C.FA_UINT8 || raw.ndim != 1 || raw.stride[0] != 1) {
		return &Error{Status: ErrShape, Text: "workspace: this is not one dimension of uint8, closest together"}
	}
	ctx.workspace = workspace
	return nil
}

func (ctx *Context) workspaceBytes() C.size_t { return C.size_t(ctx.workspace.raw.shape[0]) }

// check turns a status of a call on ctx into an error.
func (ctx *Context) check(status C.fa_status) error {
	defer runtime.KeepAlive(ctx)
	if status == C.FA_OK {
		return nil
	}
	if Status(status) == ErrBusy { // its text belongs to the other call's thread
		return &Error{Status: ErrBusy, Text: ErrBusy.Error()}
	}
	return &Error{Status(status), C.GoString(C.fa_last_error(ctx.handle)), int(C.fa_last_cuda_error(ctx.handle))}
}

// Device describes the device of a context.
type Device struct {
	Name              string
	CUDA              bool
	Index             int    // CUDA: number of the device
	Threads           int    // CPU: threads a call may use
	ISA               CPUISA // CPU
	ComputeCapability int    // CUDA: major * 10 + minor
	Multiprocessors   int    // CUDA
	MemoryBytes       uint64
}

// Device describes the device of the context and the part of it that calls use.
func (ctx *Context) Device() (Device, error) {
	if ctx.handle == nil {
		return Device{}, errClosed
	}
	var p C.fa_device_properties
	C.fa_device_properties_init(&p, C.sizeof_fa_device_properties)
	if err := ctx.check(C.fa_device_info(ctx.handle, &p)); err != nil {
		return Device{}, err
	}
	return Device{
		Name: C.GoString(&p.name[0]), CUDA: p.device_type == C.FA_DEVICE_CUDA, Index: int(p.device_index),
		Threads: int(p.num_threads), ISA: CPUISA(p.cpu_isa), ComputeCapability: int(p.compute_capability),
		Multiprocessors: int(p.multiprocessors), MemoryBytes: uint64(p.memory_bytes),
	}, nil
}

// Version is the version of the loaded library.
func Version() string { return C.GoString(C.fa_version_string()) }

// BuildInfo lists what the loaded library contains, one key=value per line.
func BuildInfo() string { return C.GoString(C.fa_build_info()) }
