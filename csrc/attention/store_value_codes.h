// Codes of four bits of the values in blocks that have just been filled, by which select_pages attends to the pages
// that it does not choose.
//
// A value is rotated and rounded as a key is, see key_codes.h. But products with probabilities add up over tokens, so a
// word has eight tokens' codes of one channel: byte b of word [g][c] has those of the tokens 8 g + b, in its lower
// half, and 8 g + 4 + b, in channel c of the rotated value.
#pragma once

#include "attention/store_key_codes.h"

FASTINFER_CPU_KERNEL(store_value_codes, StoreCodesParams)
