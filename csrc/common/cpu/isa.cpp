#include "common/cpu/isa.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "common/cpu/tile_check.h"

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
      {"amx-tile", __builtin_cpu_supports("amx-tile") != 0},
      {"amx-int8", __builtin_cpu_supports("amx-int8") != 0},
      {"amx-bf16", __builtin_cpu_supports("amx-bf16") != 0},
  };
#else
  return {};
#endif
}

// The instruction set that FASTINFER_CPU_ISA names; empty where it names none.
std::string named_isa() {
  const char* value = std::getenv("FASTINFER_CPU_ISA");
  return value == nullptr ? "" : value;
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
    case Isa::kAmx: {
      auto features = required_features(Isa::kAvx512Bf16);
      features.insert(features.end(), {"amx-tile", "amx-int8", "amx-bf16"});
      return features;
    }
    case Isa::kAmxEmulated: return required_features(Isa::kAvx2);
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

// Why tiles cannot be used where the CPU has them; empty if they can. Found out once, in less than a millisecond: Linux
// (5.16 and newer) must permit them, which threads and forks inherit, and they must compute what the kernels were
// tested with. The permission fails with EINVAL or ENOSYS under kernels that do not know it (gVisor), and with ENOSPC
// where a thread has an alternate signal stack that is too small for the tiles' state. Only call it where tiles are
// wanted: from then on, sigaltstack() refuses such stacks.
const std::string& tile_obstacle() {
  static const std::string obstacle = []() -> std::string {
#if defined(__x86_64__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
      return std::string("needs tiles, which the operating system refuses (") + std::strerror(errno) + ")";
    }
    const std::string difference = tile_difference(amx::check_tiles, amx_emulated::check_tiles);
    if (!difference.empty()) return "fails its self-check on this CPU: " + difference;
#endif
    return "";
  }();
  return obstacle;
}

// Why an instruction set cannot be used: an end of "amx ..."; empty if it can.
std::string obstacle(Isa isa) {
  const auto missing = missing_features(isa);
  if (!missing.empty()) return "needs " + join(missing) + ", which this CPU lacks";
  return isa == Isa::kAmx ? tile_obstacle() : "";
}

// The best instruction set below the tiles.
Isa best_vectors() {
  for (const Isa isa : {Isa::kAvx512Bf16, Isa::kAvx512Vnni, Isa::kAvx2}) {
    if (missing_features(isa).empty()) return isa;
  }
  return Isa::kPortable;
}

IsaChoice choice_of(Isa isa, std::string reason) {
  const bool has_tiles = isa == Isa::kAmx || isa == Isa::kAmxEmulated;
  return {isa, std::move(reason), has_tiles ? best_vectors() : isa};
}

IsaChoice choose() {
  const std::string wanted = named_isa();
  if (!wanted.empty()) {
    std::vector<std::string> names;
    for (Isa isa : built_isas()) {
      names.emplace_back(name(isa));
      if (names.back() != wanted) continue;
      const std::string problem = obstacle(isa);
      if (problem.empty()) return choice_of(isa, "set by FASTINFER_CPU_ISA");
      throw std::runtime_error("FASTINFER_CPU_ISA=" + wanted + ": it " + problem);
    }
    throw std::runtime_error("FASTINFER_CPU_ISA must be one of " + join(names) + ", got '" + wanted + "'");
  }
  const Isa best = usable_isas().back();
  if (best == built_isas().back()) return choice_of(best, "the best that was built");
  const auto built = built_isas();
  const Isa next = *(std::ranges::find(built, best) + 1);
  return choice_of(best, std::string(name(next)) + " " + obstacle(next));
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kAmxEmulated: return "amx_emulated";
    case Isa::kAmx: return "amx";
    case Isa::kAvx512Bf16: return "avx512_bf16";
    case Isa::kAvx512Vnni: return "avx512_vnni";
    case Isa::kAvx2: return "avx2";
    default: return "portable";
  }
}

std::vector<Isa> built_isas() {
#if defined(__x86_64__)
  std::vector<Isa> isas{Isa::kPortable, Isa::kAvx2, Isa::kAvx512Vnni, Isa::kAvx512Bf16, Isa::kAmx};
  if (named_isa() == name(Isa::kAmxEmulated)) isas.push_back(Isa::kAmxEmulated);
  return isas;
#else
  return {Isa::kPortable};
#endif
}

std::vector<Isa> usable_isas() {
  auto isas = built_isas();
  const auto named = std::ranges::find(isas, named_isa(), [](Isa isa) { return std::string(name(isa)); });
  if (named != isas.end()) isas.erase(named + 1, isas.end());
  std::erase_if(isas, [](Isa isa) { return !obstacle(isa).empty(); });
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
