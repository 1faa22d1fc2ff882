//! Text that people read or write.

/// The beginning of a text, as much of it as fits.
pub fn cut(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or(0);
    &text[..end]
}

/// The line in which a byte of a text lies, from 1.
pub fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}

/// An amount of memory, as people write it, apart: the number, and by how many bits its unit shifts it; `None` for nothing.
pub fn memory_parts(text: &str) -> Option<(&str, u32)> {
    let last = text.chars().last()?;
    let shift = match last.to_ascii_uppercase() {
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        _ => 0,
    };
    let number = if shift > 0 {
        &text[..text.len() - last.len_utf8()]
    } else {
        text
    };
    Some((number.trim(), shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_is_cut_between_characters() {
        assert_eq!(cut("olga läuft", 6), "olga l");
        assert_eq!(cut("olga läuft", 7), "olga l");
        assert_eq!(cut("olga", 7), "olga");
    }

    #[test]
    fn a_byte_lies_in_the_line_whose_end_comes_next() {
        assert_eq!(
            [0, 1, 2, 3, 9].map(|at| line_of("a\nb\n", at)),
            [1, 1, 2, 2, 3]
        );
    }

    #[test]
    fn amounts_of_memory_have_one_unit_or_none() {
        assert_eq!(memory_parts("4G"), Some(("4", 30)));
        assert_eq!(memory_parts("1.5 k"), Some(("1.5", 10)));
        assert_eq!(memory_parts("17"), Some(("17", 0)));
        assert_eq!(memory_parts("4 GK"), Some(("4 G", 10)));
        assert_eq!(memory_parts("ä"), Some(("ä", 0)));
        assert_eq!(memory_parts(""), None);
    }
}
