// SPDX-License-Identifier: Apache-2.0
// Stands in for <cstddef> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
typedef unsigned long size_t;
typedef long ptrdiff_t;
#ifndef offsetof
#define offsetof(type, member) ((size_t)__INTADDR__(&(((type *)0)->member)))
#endif
