// The decode kernels (`decode.h`) for pages of rotated codes.
#include "decode.h"
#include "rot_attend.h"

namespace tierd {

// kSets: sets of eight query heads for a kv head. With 256 channels there are registers for one.
template <class Query, int kKeyBits, int kValueBits, int kDim, int kSets> struct RotShape {
  static constexpr int kWarps = kDim > 128 ? 2 : 4, kResident = kSets > 1 ? (kDim > 64 ? 2 : 3) : kDim > 128 ? 3 : 4;
  using Kernel = Decode<RotatedAttention<Query, kKeyBits, kValueBits, kDim, kSets>, kWarps>;
};

}  // namespace tierd

using namespace tierd;

#define ROT_AS(NAME, QUERY, KEY, VALUE, DIM, SETS)                                                     \
  SIMT_RESIDENT_KERNEL(NAME, DecodeParams, (RotShape<QUERY, KEY, VALUE, DIM, SETS>::Kernel::kThreads), \
      (RotShape<QUERY, KEY, VALUE, DIM, SETS>::kResident),                                             \
      (RotShape<QUERY, KEY, VALUE, DIM, SETS>::Kernel::run<false>))
#define ROT_NARROW(QUERY, Q, KEY, VALUE, DIM) ROT_AS(decode_##Q##_rot##KEY##VALUE##_##DIM, QUERY, KEY, VALUE, DIM, 1)
#define ROT_BOTH(QUERY, Q, KEY, VALUE, DIM)  \
  ROT_NARROW(QUERY, Q, KEY, VALUE, DIM)     \
  ROT_AS(decode_##Q##_rot##KEY##VALUE##_##DIM##_wide, QUERY, KEY, VALUE, DIM, 2)
#define ROT_TYPES(EACH, DIM)                                                       \
  EACH(Bf16, bf16, 8, 8, DIM) EACH(Bf16, bf16, 8, 4, DIM) EACH(Bf16, bf16, 4, 4, DIM) \
  EACH(F16, f16, 8, 8, DIM) EACH(F16, f16, 8, 4, DIM) EACH(F16, f16, 4, 4, DIM)
#define ROT_64 ROT_TYPES(ROT_BOTH, 64)
#define ROT_96
#define ROT_128 ROT_TYPES(ROT_BOTH, 128)
#define ROT_256 ROT_TYPES(ROT_NARROW, 256)
#define ROT_DIM(DIM) ROT_##DIM

TIERD_DIMS(ROT_DIM)
