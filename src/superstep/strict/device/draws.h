// Random numbers: each device has a seed and a count of the calls that drew, as CUDA's generators have (Philox's offset).
// What a call draws follows from these when it is issued, whenever it runs.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "tensors.h"

namespace strict {

constexpr uint64_t FIRST_SEED = 67280421310721;  // torch's c10::detail default_rng_seed_val

// A step of splitmix64 (Steele, Lea, Flood 2014): seeds that are near give streams that are not.
inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

inline std::pair<uint64_t, uint64_t>& random_state(int device) {
  return state.random_states.try_emplace(device, FIRST_SEED, 0).first->second;
}

// A generator for the next call of a device.
inline at::Generator next_generator(int device) {
  Lock lock(state.lock);
  auto& [seed, calls] = random_state(device);
  return at::detail::createCPUGenerator(mixed(mixed(seed) ^ ++calls));
}

// Gives a call that draws a generator of its device, in the place of none.
inline void give_generator(const c10::FunctionSchema& schema, int device, std::vector<c10::IValue>& arguments) {
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& type = schema.arguments()[i].type();
    bool is_generator = type->kind() == c10::TypeKind::OptionalType && type->containedType(0)->kind() == c10::TypeKind::GeneratorType;
    if (is_generator && arguments[i].isNone()) arguments[i] = next_generator(device);
  }
}

}  // namespace strict
