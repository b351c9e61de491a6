// The decisions of a launch policy as names and numbers, for `fastinfer info --plan` and for tests on any machine.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/launch_config.h"

namespace fastinfer {

using Sizes = std::map<std::string, int64_t>;

struct NamedLaunch {
  std::string kernel;
  cuda::LaunchConfig config;
};

struct LaunchPlan {
  std::vector<std::pair<std::string, int64_t>> facts;  // a name that ends in _bytes is in bytes
  int64_t workspace_bytes;
  std::vector<NamedLaunch> launches;
};

// The sizes that an operator's policy asks for, in their order.
struct PlanSize {
  std::string name;
  int64_t least;
  int64_t usual = -1;  // taken where none is given; -1: one must be
};

// Operators with a policy, and what it asks for.
std::vector<std::pair<std::string, std::vector<PlanSize>>> planned_operators();

// Throws std::invalid_argument, which names it, for an operator or a size that does not fit.
LaunchPlan launch_plan(const std::string& op, Sizes sizes, const cuda::Device& device);

}  // namespace fastinfer
