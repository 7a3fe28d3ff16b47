// Stands in for gloo's header, which libtorch's wheel lacks: of gloo, ProcessGroupGloo.hpp needs opaque types behind
// pointers and the base of a class that is not made here.
#pragma once
