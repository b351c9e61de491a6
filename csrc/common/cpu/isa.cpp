#include "common/cpu/isa.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace fastinfer::cpu {
namespace {

struct Feature {
  const char* name;
  bool present;
};

std::vector<Feature> detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return {
      {"avx2", __builtin_cpu_supports("avx2") != 0},
      {"fma", __builtin_cpu_supports("fma") != 0},
      {"f16c", __builtin_cpu_supports("f16c") != 0},
      {"avx512f", __builtin_cpu_supports("avx512f") != 0},
      {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
      {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
      {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
      {"avx512vnni", __builtin_cpu_supports("avx512vnni") != 0},
      {"avx512bf16", __builtin_cpu_supports("avx512bf16") != 0},
  };
#else
  return {};
#endif
}

std::vector<std::string> required_features(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return {"avx2", "fma", "f16c"};
    case Isa::kAvx512Vnni: return {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"};
    case Isa::kAvx512Bf16: {
      auto features = required_features(Isa::kAvx512Vnni);
      features.emplace_back("avx512bf16");
      return features;
    }
    default: return {};
  }
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::vector<std::string> missing_features(Isa isa) {
  const auto present = cpu_features();
  auto missing = required_features(isa);
  std::erase_if(missing, [&](const std::string& f) { return std::ranges::find(present, f) != present.end(); });
  return missing;
}

// The instruction set that FASTINFER_CPU_ISA names; empty where it names none.
std::string named_isa() {
  const char* value = std::getenv("FASTINFER_CPU_ISA");
  return value == nullptr ? "" : value;
}

IsaChoice choose() {
  const std::string wanted = named_isa();
  if (!wanted.empty()) {
    std::vector<std::string> names;
    for (Isa isa : built_isas()) {
      names.emplace_back(name(isa));
      if (names.back() != wanted) continue;
      const auto missing = missing_features(isa);
      if (missing.empty()) return {isa, "set by FASTINFER_CPU_ISA"};
      throw std::runtime_error("FASTINFER_CPU_ISA=" + wanted + ": this machine's CPU lacks " + join(missing));
    }
    throw std::runtime_error("FASTINFER_CPU_ISA must be one of " + join(names) + ", got '" + wanted + "'");
  }
  const Isa best = usable_isas().back();
  if (best == built_isas().back()) return {best, "the best that was built"};
  const auto built = built_isas();
  const Isa next = *(std::ranges::find(built, best) + 1);
  return {best, std::string(name(next)) + " needs " + join(missing_features(next)) + ", which this CPU lacks"};
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kAvx512Vnni: return "avx512_vnni";
    case Isa::kAvx2: return "avx2";
    default: return "portable";
  }
}

std::vector<Isa> built_isas() {
#if defined(__x86_64__)
  return {Isa::kPortable, Isa::kAvx2, Isa::kAvx512Vnni, Isa::kAvx512Bf16};
#else
  return {Isa::kPortable};
#endif
}

std::vector<Isa> usable_isas() {
  auto isas = built_isas();
  const auto named = std::ranges::find(isas, named_isa(), [](Isa isa) { return std::string(name(isa)); });
  if (named != isas.end()) isas.erase(named + 1, isas.end());
  std::erase_if(isas, [](Isa isa) { return !missing_features(isa).empty(); });
  return isas;
}

std::vector<std::string> cpu_features() {
  std::vector<std::string> names;
  for (const auto& feature : detect()) {
    if (feature.present) names.emplace_back(feature.name);
  }
  return names;
}

const IsaChoice& active_isa() {
  static const IsaChoice choice = choose();
  return choice;
}

}  // namespace fastinfer::cpu
