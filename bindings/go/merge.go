// SPDX-License-Identifier: Apache-2.0

package flashattn

// #include "shim.h"
import "C"

import (
	"fmt"
	"unsafe"
)

// Part is the result of Forward over one set of keys.
type Part struct{ Out, LSE Tensor }

// Merge merges results over disjoint sets of keys into the result over all of them. lse may be the zero Tensor; out and lse may be those of
// one of the parts. At most 16 parts can be slices (addresses of Go memory reach C as arguments); merge more in steps.
func (ctx *Context) Merge(parts []Part, out, lse Tensor) error {
	return ctx.merge(parts, &out, &lse, C.GO_RUN, nil)
}

// PrepareMerge loads the kernels of Merge. See PrepareForward.
func (ctx *Context) PrepareMerge(parts []Part, out, lse Tensor) error {
	return ctx.merge(parts, &out, &lse, C.GO_PREPARE, nil)
}

// QueryMerge reports how Merge would run, or why it would not. It reads no tensor data.
func (ctx *Context) QueryMerge(parts []Part, out, lse Tensor) (Plan, error) {
	return plan(func(info *C.fa_plan_info) error { return ctx.merge(parts, &out, &lse, C.GO_QUERY, info) })
}

func (ctx *Context) merge(parts []Part, out, lse *Tensor, what C.int, info *C.fa_plan_info) error {
	if ctx.handle == nil {
		return errClosed
	}
	if len(parts) > C.GO_MOST_PARTS && !ctx.cuda {
		return &Error{Status: ErrInvalidArgument, Text: fmt.Sprintf("%d parts; at most %d can be slices", len(parts), C.GO_MOST_PARTS)}
	}
	var raw C.fa_merge_problem
	C.fa_merge_problem_init(&raw, C.sizeof_fa_merge_problem)
	raw.num_parts = C.int32_t(len(parts))
	if err := ctx.fill([]named{{"out", out, &raw.out}, {"lse", lse, &raw.lse}}); err != nil {
		return err
	}
	// Room for at least as many as there are arguments, so that there is a first one.
	room := len(parts)
	if room < C.GO_MOST_PARTS {
		room = C.GO_MOST_PARTS
	}
	outs, lses := make([]C.fa_tensor, room), make([]C.fa_tensor, room)
	var o, l [C.GO_MOST_PARTS]unsafe.Pointer
	for n := range parts {
		part := &parts[n]
		err := ctx.fill([]named{
			{fmt.Sprintf("parts[%d].Out", n), &part.Out, &outs[n]}, {fmt.Sprintf("parts[%d].LSE", n), &part.LSE, &lses[n]},
		})
		if err != nil {
			return err
		}
		if n < len(o) {
			o[n], l[n] = part.Out.data, part.LSE.data
		}
		if ctx.cuda {
			outs[n].data, lses[n].data = part.Out.data, part.LSE.data
		}
	}
	return ctx.check(C.go_merge(ctx.handle, what, info, ctx.workspace.data, ctx.workspaceBytes(), ctx.stream, &raw, &outs[0], &lses[0],
		out.data, lse.data,
		o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7], o[8], o[9], o[10], o[11], o[12], o[13], o[14], o[15],
		l[0], l[1], l[2], l[3], l[4], l[5], l[6], l[7], l[8], l[9], l[10], l[11], l[12], l[13], l[14], l[15]))
}
