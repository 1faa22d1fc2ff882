//! Parser for the format strings of `pvm_packf` and `pvm_unpackf`:
//! `%[count][.stride][hlu]conversion`.
//!
//! Text outside of conversions is skipped.

use sempa_proto::{PvmError, PvmResult};

/// A count or a stride.
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
    /// `%+` at the very beginning: starts a new send buffer, whose encoding is the next argument.
    NewBuffer,
    /// Data to pack or unpack.
    Data {
        kind: Conversion,
        /// Number of elements. `None` means one, which `pvm_packf` takes by value.
        count: Option<CountOrStride>,
        /// Distance of the elements, in elements.
        stride: Option<CountOrStride>,
    },
}

/// Iterator over the conversions of a format string.
pub(crate) struct FormatItems<'a> {
    text: &'a [u8],
    at_start: bool,
}

impl<'a> FormatItems<'a> {
    pub(crate) fn new(text: &'a [u8]) -> FormatItems<'a> {
        FormatItems {
            text,
            at_start: true,
        }
    }

    fn next_byte(&mut self) -> Option<u8> {
        let (first, rest) = self.text.split_first()?;
        self.text = rest;
        Some(*first)
    }

    fn parse_number(&mut self) -> Option<CountOrStride> {
        if let Some(rest) = self.text.strip_prefix(b"*") {
            self.text = rest;
            return Some(CountOrStride::Argument);
        }
        let digits = self
            .text
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        let (number, rest) = self.text.split_at(digits);
        self.text = rest;
        let add = |value: i32, digit: &u8| {
            value
                .saturating_mul(10)
                .saturating_add(i32::from(digit - b'0'))
        };
        (digits > 0).then(|| CountOrStride::Literal(number.iter().fold(0, add)))
    }

    fn parse_data(&mut self) -> PvmResult<FormatItem> {
        let count = self.parse_number();
        let stride = match self.text.strip_prefix(b".") {
            Some(rest) => {
                self.text = rest;
                self.parse_number()
            }
            None => None,
        };
        let (mut long, mut short, mut unsigned) = (false, false, false);
        loop {
            let kind = match (
                self.next_byte().ok_or(PvmError::BadParam)?,
                long,
                short,
                unsigned,
            ) {
                (b'l', ..) => {
                    long = true;
                    continue;
                }
                (b'h', ..) => {
                    short = true;
                    continue;
                }
                // Before another conversion `u` is a modifier; at the end it is itself a
                // conversion.
                (b'u', ..) => {
                    unsigned = true;
                    if self.text.first().is_some_and(|byte| b"dlh".contains(byte)) {
                        continue;
                    }
                    Self::integer_conversion(long, short, true)
                }
                (b'd', ..) => Self::integer_conversion(long, short, unsigned),
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

    fn integer_conversion(long: bool, short: bool, unsigned: bool) -> Conversion {
        match (long, short, unsigned) {
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
        let first = std::mem::take(&mut self.at_start);
        if first && let Some(rest) = self.text.strip_prefix(b"%+") {
            self.text = rest;
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

    fn items(text: &str) -> Vec<PvmResult<FormatItem>> {
        FormatItems::new(text.as_bytes()).collect()
    }

    fn single(kind: Conversion) -> PvmResult<FormatItem> {
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
            items("%+ %d %hd, %ld%u%hu%lu"),
            [
                Ok(FormatItem::NewBuffer),
                single(Conversion::Int),
                single(Conversion::Short),
                single(Conversion::Long),
                single(Conversion::UInt),
                single(Conversion::UShort),
                single(Conversion::ULong),
            ]
        );
        assert_eq!(
            items("%f%lf%x%lx%s%c%ud"),
            [
                single(Conversion::Float),
                single(Conversion::Double),
                single(Conversion::Complex),
                single(Conversion::DoubleComplex),
                single(Conversion::Str),
                single(Conversion::Byte),
                single(Conversion::UInt),
            ]
        );
    }

    /// Counts and strides are parsed as literals or as `*`.
    #[test]
    fn counts_and_strides_are_literals_or_arguments() {
        let data = |count, stride| {
            Ok(FormatItem::Data {
                kind: Conversion::Int,
                count,
                stride,
            })
        };
        assert_eq!(
            items("%10.2d"),
            [data(
                Some(CountOrStride::Literal(10)),
                Some(CountOrStride::Literal(2))
            )]
        );
        assert_eq!(
            items("%*.*d"),
            [data(
                Some(CountOrStride::Argument),
                Some(CountOrStride::Argument)
            )]
        );
        assert_eq!(items("%.3d"), [data(None, Some(CountOrStride::Literal(3)))]);
    }

    /// An unknown or incomplete conversion is an error; text without `%` is skipped.
    #[test]
    fn unknown_conversions_fail_and_text_is_skipped() {
        assert_eq!(items("hello"), []);
        assert_eq!(items("%q"), [Err(PvmError::BadParam)]);
        assert_eq!(items("%"), [Err(PvmError::BadParam)]);
        assert_eq!(items("x%+"), [Err(PvmError::BadParam)]);
    }
}
