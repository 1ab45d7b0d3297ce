//! Text in the data of INQUIRY.

/// Appends `text` in a field of `width` bytes: left-aligned, padded with spaces, printable ASCII only. Source: SPC-4
/// section 4.4.1.
pub(crate) fn padded(text: &str, width: usize, data_in: &mut Vec<u8>) {
    let end = data_in.len() + width;
    data_in.extend(printable(text).take(width));
    data_in.resize(end, b' ');
}

/// Returns `text` in printable ASCII.
pub(crate) fn printable(text: &str) -> impl Iterator<Item = u8> {
    text.chars().map(|letter| if matches!(letter, ' '..='~') { letter as u8 } else { b' ' })
}
