// SPDX-License-Identifier: Apache-2.0
// Stands in for <math_constants.h> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)
