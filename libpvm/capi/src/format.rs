//! Parser for the format strings of `pvm_packf` and `pvm_unpackf`:
//! `%[count][.stride][hlu]conversion`.
//!
//! Text outside of conversions is skipped.

use sempa_proto::{PvmError, PvmResult};

/// The count or the stride of a conversion in a format string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CountOrStride {
    /// A number written in the format string.
    Literal(i32),
    /// `*`: the value is the next argument.
    Argument,
}

/// Data type of a conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Conversion {
    /// Written `c` in a format string.
    Byte,
    /// Written `hd` in a format string.
    Short,
    /// Written `hu` in a format string.
    UShort,
    /// Written `d` in a format string.
    Int,
    /// Written `u` in a format string.
    UInt,
    /// Written `ld` in a format string.
    Long,
    /// Written `lu` in a format string.
    ULong,
    /// Written `f` in a format string.
    Float,
    /// Written `lf` in a format string.
    Double,
    /// Written `x` in a format string.
    Complex,
    /// Written `lx` in a format string.
    DoubleComplex,
    /// Written `s` in a format string.
    Str,
}

/// One conversion of a format string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FormatItem {
    /// `%+` at the start of the format string: creates a new send buffer, whose encoding is the
    /// next argument.
    NewBuffer,
    /// Data to pack or unpack.
    Data {
        kind: Conversion,
        /// Number of elements. `None` means one element, which `pvm_packf` takes by value.
        count: Option<CountOrStride>,
        /// Distance of successive elements, in elements; `None` means 1.
        stride: Option<CountOrStride>,
    },
}

/// Iterator over the conversions of a format string.
pub(crate) struct FormatItems<'a> {
    remaining_text: &'a [u8],
    is_at_start: bool,
}

impl<'a> FormatItems<'a> {
    pub(crate) fn new(text: &'a [u8]) -> Self {
        FormatItems {
            remaining_text: text,
            is_at_start: true,
        }
    }

    fn next_byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.remaining_text.split_first()?;
        self.remaining_text = rest;
        Some(*byte)
    }

    fn parse_count_or_stride(&mut self) -> Option<CountOrStride> {
        if let Some(rest) = self.remaining_text.strip_prefix(b"*") {
            self.remaining_text = rest;
            return Some(CountOrStride::Argument);
        }
        let digit_count = self
            .remaining_text
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        let (digits, rest) = self.remaining_text.split_at(digit_count);
        self.remaining_text = rest;
        let append_digit = |value: i32, digit: &u8| {
            value
                .saturating_mul(10)
                .saturating_add(i32::from(digit - b'0'))
        };
        (digit_count > 0).then(|| CountOrStride::Literal(digits.iter().fold(0, append_digit)))
    }

    fn parse_data(&mut self) -> PvmResult<FormatItem> {
        let count = self.parse_count_or_stride();
        let stride = match self.remaining_text.strip_prefix(b".") {
            Some(rest) => {
                self.remaining_text = rest;
                self.parse_count_or_stride()
            }
            None => None,
        };
        let (mut is_long, mut is_short, mut is_unsigned) = (false, false, false);
        loop {
            let kind = match (
                self.next_byte().ok_or(PvmError::BadParam)?,
                is_long,
                is_short,
                is_unsigned,
            ) {
                (b'l', ..) => {
                    is_long = true;
                    continue;
                }
                (b'h', ..) => {
                    is_short = true;
                    continue;
                }
                // Before another conversion character, `u` is a modifier. Otherwise `u` is the
                // conversion itself.
                (b'u', ..) => {
                    is_unsigned = true;
                    if self
                        .remaining_text
                        .first()
                        .is_some_and(|byte| b"dlh".contains(byte))
                    {
                        continue;
                    }
                    Self::select_integer_conversion(is_long, is_short, true)
                }
                (b'd', ..) => Self::select_integer_conversion(is_long, is_short, is_unsigned),
                (b'c', ..) => Conversion::Byte,
                (b'f', false, ..) => Conversion::Float,
                (b'f', true, ..) => Conversion::Double,
                (b'x', false, ..) => Conversion::Complex,
                (b'x', true, ..) => Conversion::DoubleComplex,
                (b's', ..) => Conversion::Str,
                _ => return Err(PvmError::BadParam),
            };
            return Ok(FormatItem::Data {
                kind,
                count,
                stride,
            });
        }
    }

    fn select_integer_conversion(is_long: bool, is_short: bool, is_unsigned: bool) -> Conversion {
        match (is_long, is_short, is_unsigned) {
            (true, _, false) => Conversion::Long,
            (true, _, true) => Conversion::ULong,
            (_, true, false) => Conversion::Short,
            (_, true, true) => Conversion::UShort,
            (_, _, false) => Conversion::Int,
            (_, _, true) => Conversion::UInt,
        }
    }
}

impl Iterator for FormatItems<'_> {
    type Item = PvmResult<FormatItem>;

    fn next(&mut self) -> Option<PvmResult<FormatItem>> {
        let was_at_start = std::mem::take(&mut self.is_at_start);
        if was_at_start && let Some(rest) = self.remaining_text.strip_prefix(b"%+") {
            self.remaining_text = rest;
            return Some(Ok(FormatItem::NewBuffer));
        }
        loop {
            if self.next_byte()? == b'%' {
                return Some(self.parse_data());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_items(text: &str) -> Vec<PvmResult<FormatItem>> {
        FormatItems::new(text.as_bytes()).collect()
    }

    fn single_item(kind: Conversion) -> PvmResult<FormatItem> {
        Ok(FormatItem::Data {
            kind,
            count: None,
            stride: None,
        })
    }

    /// Every conversion of PVM's format strings is parsed to its data type.
    #[test]
    fn all_conversions_are_parsed() {
        assert_eq!(
            parse_items("%+ %d %hd, %ld%u%hu%lu"),
            [
                Ok(FormatItem::NewBuffer),
                single_item(Conversion::Int),
                single_item(Conversion::Short),
                single_item(Conversion::Long),
                single_item(Conversion::UInt),
                single_item(Conversion::UShort),
                single_item(Conversion::ULong),
            ]
        );
        assert_eq!(
            parse_items("%f%lf%x%lx%s%c%ud"),
            [
                single_item(Conversion::Float),
                single_item(Conversion::Double),
                single_item(Conversion::Complex),
                single_item(Conversion::DoubleComplex),
                single_item(Conversion::Str),
                single_item(Conversion::Byte),
                single_item(Conversion::UInt),
            ]
        );
    }

    /// Counts and strides are parsed as literals or as `*`.
    #[test]
    fn counts_and_strides_are_literals_or_arguments() {
        let int_item = |count, stride| {
            Ok(FormatItem::Data {
                kind: Conversion::Int,
                count,
                stride,
            })
        };
        assert_eq!(
            parse_items("%10.2d"),
            [int_item(
                Some(CountOrStride::Literal(10)),
                Some(CountOrStride::Literal(2))
            )]
        );
        assert_eq!(
            parse_items("%*.*d"),
            [int_item(
                Some(CountOrStride::Argument),
                Some(CountOrStride::Argument)
            )]
        );
        assert_eq!(
            parse_items("%.3d"),
            [int_item(None, Some(CountOrStride::Literal(3)))]
        );
    }

    /// An unknown or incomplete conversion is an error; text without `%` is skipped.
    #[test]
    fn unknown_conversions_fail_and_text_is_skipped() {
        assert_eq!(parse_items("hello"), []);
        assert_eq!(parse_items("%q"), [Err(PvmError::BadParam)]);
        assert_eq!(parse_items("%"), [Err(PvmError::BadParam)]);
        assert_eq!(parse_items("x%+"), [Err(PvmError::BadParam)]);
    }
}
