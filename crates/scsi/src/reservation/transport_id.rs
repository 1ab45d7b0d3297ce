//! Names of initiator ports in the form of SPC-4: a SAS TransportID whose address is a hash of the port's name.

/// Length of a SAS TransportID. Source: SPC-4 section 7.6.4.6.
pub(super) const LEN: usize = 24;
/// FORMAT CODE 0, PROTOCOL IDENTIFIER 6 (SAS).
const SAS: u8 = 0x06;

/// Returns a locally assigned NAA designator (NAA = 3, 60 bits chosen by its user) made from a name. Source: SPC-4
/// section 7.8.6.6.4. The mapping must never change: stored reservations and guests depend on it.
pub fn locally_assigned(name: &str) -> u64 {
    // FNV-1a, 64 bits, with its upper and lower bits folded into 60.
    let hash = fnv1a(name.as_bytes());
    (0x3 << 60) | ((hash ^ (hash >> 60)) & ((1 << 60) - 1))
}

/// Returns the 64-bit FNV-1a hash.
pub(super) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns the TransportID of an initiator port.
pub(super) fn write(initiator: &str) -> [u8; LEN] {
    let mut id = [0; LEN];
    id[0] = SAS;
    id[4..12].copy_from_slice(&locally_assigned(initiator).to_be_bytes());
    id
}

/// Returns the address in a TransportID, or `None` if it is not a SAS one.
pub(super) fn read(id: &[u8; LEN]) -> Option<u64> {
    let address = id[4..12].iter().fold(0, |address, byte| address << 8 | u64::from(*byte));
    (id[0] == SAS).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable_and_locally_assigned() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        // Published test vectors of FNV-1a.
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(locally_assigned("foobar"), 0x3594_4171_f739_67e0);
        assert_ne!(locally_assigned("vm0"), locally_assigned("vm1"));
    }

    #[test]
    fn an_id_is_read_back() {
        let id = write("vm0");
        assert_eq!((id[0], id[4] >> 4), (6, 3));
        assert_eq!(read(&id), Some(locally_assigned("vm0")));
        let mut other = id;
        other[0] = 0x05;
        assert_eq!(read(&other), None);
    }
}
