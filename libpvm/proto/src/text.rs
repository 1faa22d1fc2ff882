//! Helpers for texts that users write or read: truncation, line numbers and memory sizes, and
//! names of hosts.

use crate::ids::HostId;

/// Returns the longest prefix of at most `bytes_max` bytes that ends at a character boundary.
pub fn truncate(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len()))
        .rev()
        .find(|index| text.is_char_boundary(*index))
        .unwrap_or(0);
    &text[..end]
}

/// Returns a reason for a sentence that ends with it. Another program may have supplied an empty
/// one.
pub fn reason(text: &str) -> &str {
    match text.trim() {
        "" => "no reason was given",
        reason => reason,
    }
}

/// Formats a number of processes, such as "2 processes".
pub fn process_count(count: u32) -> String {
    let ending = if count == 1 { "" } else { "es" };
    format!("{count} process{ending}")
}

/// Returns the line number, from 1, of the byte at offset `offset`.
pub fn line_number(text: &str, offset: usize) -> usize {
    text.bytes()
        .take(offset)
        .filter(|byte| *byte == b'\n')
        .count()
        + 1
}

/// Splits a memory size such as `4G` into the text of the number and the binary shift of its unit;
/// the shift is 0 without a unit. Returns `None` for an empty text.
pub fn split_memory_size(text: &str) -> Option<(&str, u32)> {
    let suffix = text.chars().last()?;
    let shift = match suffix.to_ascii_uppercase() {
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        _ => 0,
    };
    let number = if shift > 0 {
        &text[..text.len() - suffix.len_utf8()]
    } else {
        text
    };
    Some((number.trim(), shift))
}

/// Formats a number of bytes in the largest unit of which there is one, with at most one decimal
/// place, such as "1.2 GiB". The number is rounded up, so that more than 1 GiB is not "1 GiB".
pub fn binary_size(bytes: u64) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let Some((shift, unit)) = UNITS.into_iter().find(|(shift, _)| bytes >> shift > 0) else {
        return format!("{bytes} bytes");
    };
    let tenths = (u128::from(bytes) * 10).div_ceil(1 << shift);
    match tenths % 10 {
        0 => format!("{} {unit}", tenths / 10),
        tenth => format!("{}.{tenth} {unit}", tenths / 10),
    }
}

/// Replaces every host number in `text`, in the form that [`HostId`] prints, by the host's name.
pub fn replace_host_numbers<'a>(text: &str, name: impl Fn(HostId) -> Option<&'a str>) -> String {
    const PREFIX: &str = "host ";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(prefix_start) = rest.find(PREFIX) {
        let (preceding_text, following_text) =
            (&rest[..prefix_start], &rest[prefix_start + PREFIX.len()..]);
        let digit_count = following_text
            .bytes()
            .take_while(u8::is_ascii_digit)
            .count();
        let is_word_start = !preceding_text.ends_with(|c: char| c.is_alphanumeric());
        let host = following_text[..digit_count]
            .parse()
            .ok()
            .and_then(HostId::new)
            .filter(|_| is_word_start);
        out.push_str(preceding_text);
        match host.and_then(&name) {
            Some(name) => out.push_str(name),
            None => out.push_str(&rest[prefix_start..prefix_start + PREFIX.len() + digit_count]),
        }
        rest = &following_text[digit_count..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncation_respects_character_boundaries() {
        assert_eq!(truncate("olga läuft", 6), "olga l");
        assert_eq!(truncate("olga läuft", 7), "olga l");
        assert_eq!(truncate("olga", 7), "olga");
    }

    #[test]
    fn bytes_have_the_largest_unit() {
        let cases = [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (1025, "1.1 KiB"),
            (1228, "1.2 KiB"),
            (64 << 20, "64 MiB"),
            (u64::MAX, "16777216 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(binary_size(bytes), text);
        }
    }

    #[test]
    fn empty_reason_is_said_to_be_empty() {
        assert_eq!(reason(" the disk is full\n"), "the disk is full");
        assert_eq!(reason(" "), "no reason was given");
    }

    #[test]
    fn line_end_belongs_to_its_line() {
        assert_eq!(
            [0, 1, 2, 3, 9].map(|offset| line_number("a\nb\n", offset)),
            [1, 1, 2, 2, 3]
        );
    }

    #[test]
    fn memory_size_has_at_most_one_unit() {
        assert_eq!(split_memory_size("4G"), Some(("4", 30)));
        assert_eq!(split_memory_size("1.5 k"), Some(("1.5", 10)));
        assert_eq!(split_memory_size("17"), Some(("17", 0)));
        assert_eq!(split_memory_size("4 GK"), Some(("4 G", 10)));
        assert_eq!(split_memory_size("ä"), Some(("ä", 0)));
        assert_eq!(split_memory_size(""), None);
    }
}
