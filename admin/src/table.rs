//! Formats tables, numbers of bytes, and texts of other programs.

/// Formats rows as a table. Columns are separated by two spaces; the last one is not padded.
pub(crate) fn format_table(rows: &[Vec<String>]) -> String {
    let column_count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..column_count).map(width).collect();
    let format_row = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths);
        let line: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        line.join("  ").trim_end().to_string() + "\n"
    };
    rows.iter().map(format_row).collect()
}

/// Returns a text without control characters, so that text of other programs cannot change what the
/// terminal shows.
pub(crate) fn printable(text: &str) -> String {
    let replace = |c: char| match c {
        '\n' | '\t' => ' ',
        c if c.is_control() => '?',
        c => c,
    };
    text.chars().map(replace).collect()
}

/// Formats a number of bytes with one digit after the point.
pub(crate) fn format_bytes(bytes: u64) -> String {
    let units = [
        (1 << 40, "T"),
        (1 << 30, "G"),
        (1 << 20, "M"),
        (1 << 10, "K"),
    ];
    match units.iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{:.1}{unit}", bytes as f64 / *size as f64),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let rows = [
            vec!["USER".into(), "N".into()],
            vec!["é".into(), "10".into()],
        ];
        assert_eq!(format_table(&rows), "USER  N\né     10\n");
        assert_eq!(format_table(&[]), "");
    }

    #[test]
    fn bytes_have_units_and_texts_no_control_characters() {
        let texts = [0, 1023, 1024, 1536 << 20].map(format_bytes);
        assert_eq!(texts, ["0", "1023", "1.0K", "1.5G"]);
        assert_eq!(printable("a\nb\x1b[2J"), "a b?[2J");
    }
}
