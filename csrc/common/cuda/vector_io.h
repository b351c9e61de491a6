// Aligned vectors of elements: one 16-byte access instead of several small ones.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

template <int kCount, class T>
__device__ inline Vector<T, kCount> load_vector(const T* p) {
  return *reinterpret_cast<const Vector<T, kCount>*>(p);
}

template <int kCount, class T>
__device__ inline void store_vector(T* p, const Vector<T, kCount>& v) {
  *reinterpret_cast<Vector<T, kCount>*>(p) = v;
}

template <class T>
inline constexpr int kVectorElements = 16 / sizeof(T);

// Returns true if 16-byte accesses may start at these addresses.
template <class... Pointers>
bool vector_aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

}  // namespace fastinfer::cuda
