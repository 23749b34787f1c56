// SPDX-License-Identifier: Apache-2.0

package flashattn

// #include "shim.h"
import "C"

import (
	"fmt"
	"reflect"
)

// layouts lists every struct of flashattn.h and its fields as this package sees them: "struct size", "struct.field offset size". A test
// compares it with a C compiler's list. (cgo is not available in test files.)
func layouts() []string {
	var lines []string
	for _, s := range []struct {
		name string
		of   reflect.Type
	}{
		{"fa_config", reflect.TypeOf(C.fa_config{})},
		{"fa_device_properties", reflect.TypeOf(C.fa_device_properties{})},
		{"fa_tensor", reflect.TypeOf(C.fa_tensor{})},
		{"fa_attention", reflect.TypeOf(C.fa_attention{})},
		{"fa_gradients", reflect.TypeOf(C.fa_gradients{})},
		{"fa_plan_info", reflect.TypeOf(C.fa_plan_info{})},
		{"fa_append", reflect.TypeOf(C.fa_append{})},
		{"fa_jvp", reflect.TypeOf(C.fa_jvp{})},
		{"fa_merge_problem", reflect.TypeOf(C.fa_merge_problem{})},
		{"fa_score_source", reflect.TypeOf(C.fa_score_source{})},
		{"fa_score_tensor", reflect.TypeOf(C.fa_score_tensor{})},
		{"fa_score_position", reflect.TypeOf(C.fa_score_position{})},
		{"fa_score_aux", reflect.TypeOf(C.fa_score_aux{})},
	} {
		lines = append(lines, fmt.Sprintf("%s %d", s.name, s.of.Size()))
		for n := 0; n < s.of.NumField(); n++ {
			f := s.of.Field(n)
			if f.Name != "_" {
				lines = append(lines, fmt.Sprintf("%s.%s %d %d", s.name, f.Name, f.Offset, f.Type.Size()))
			}
		}
	}
	return lines
}
