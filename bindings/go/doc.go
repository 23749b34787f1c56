// SPDX-License-Identifier: Apache-2.0

// Package flashattn computes exact attention, forward and backward, through libflashattn.
//
//	ctx, err := flashattn.New()
//	...
//	defer ctx.Close()
//	problem := flashattn.Attention{
//		Q: flashattn.Of(q, 1, 128, 4, 64), // batch, rows, heads, head_dim
//		K: flashattn.Of(k, 1, 128, 4, 64),
//		V: flashattn.Of(v, 1, 128, 4, 64),
//		Mask: flashattn.Causal,
//	}
//	err = ctx.Forward(problem, flashattn.Of(out, 1, 128, 4, 64), flashattn.Tensor{})
//
// Tensors are views of slices and never copied. A view that does not fit its slice is reported, with its name, by the call that uses
// it. The library checks everything else, sequence offsets and page tables included, before it writes.
//
// A context with the option CUDA works on memory of a GPU instead, named by address: DeviceOf, SetStream.
//
// The package finds the library by pkg-config.
package flashattn
