#include "common/dependent_launches.h"

#include <utility>

namespace fastinfer {
namespace {

thread_local bool dependent = true;

}  // namespace

bool dependent_launches() {
  return dependent;
}

bool set_dependent_launches(bool value) {
  return std::exchange(dependent, value);
}

}  // namespace fastinfer
