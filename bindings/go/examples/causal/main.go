// SPDX-License-Identifier: Apache-2.0

// Causal attention of 8 heads over 1024 rows, forward and backward.
package main

import (
	"fmt"
	"log"
	"math/rand"

	"flashattn"
)

func main() {
	const rows, heads, dim = 1024, 8, 64
	room := func() []float32 { return make([]float32, rows*heads*dim) }
	numbers := func() []float32 {
		x := room()
		for i := range x {
			x[i] = float32(rand.NormFloat64())
		}
		return x
	}
	view := func(x []float32) flashattn.Tensor { return flashattn.Of(x, 1, rows, heads, dim) }

	ctx, err := flashattn.New()
	if err != nil {
		log.Fatal(err)
	}
	defer ctx.Close()
	problem := flashattn.Attention{Q: view(numbers()), K: view(numbers()), V: view(numbers()), Mask: flashattn.Causal}
	out, lse := view(room()), flashattn.Of(make([]float32, heads*rows), 1, heads, rows)
	if err := ctx.Forward(problem, out, lse); err != nil {
		log.Fatal(err)
	}
	dq := room()
	gradients := flashattn.Gradients{DOut: view(numbers()), DQ: view(dq), DK: view(room()), DV: view(room())}
	if err := ctx.Backward(problem, out, lse, gradients); err != nil {
		log.Fatal(err)
	}
	plan, err := ctx.QueryForward(problem, out, lse)
	if err != nil {
		log.Fatal(err)
	}
	var largest float32
	for _, x := range dq {
		if x > largest {
			largest = x
		}
	}
	fmt.Printf("libflashattn %s, kernel %s, %.1f MFLOP, largest dq %v\n", flashattn.Version(), plan.Kernel, plan.Flops/1e6, largest)
}
