mod files;
mod kills;

use mqblk_ring::blkif::RawRequest;

/// Returns a request that holds its number in each word.
fn raw(id: u64) -> RawRequest {
    let mut bytes = [0; size_of::<RawRequest>()];
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(id << 8 | at as u64).to_le_bytes());
    }
    RawRequest::from_bytes(bytes)
}

/// Returns the number of a request, or `u64::MAX` if it mixes parts of several requests.
fn id_of(found: &RawRequest) -> u64 {
    let id = u64::from_le_bytes(found.bytes()[..8].try_into().unwrap()) >> 8;
    if *found == raw(id) { id } else { u64::MAX }
}
