//! The formats of `pvm_packf` and `pvm_unpackf`: `%[count][.stride][hlu]conversion`.

use sempa_proto::{PvmError, PvmResult};

/// A count or stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    /// Written in the format.
    Is(i32),
    /// `*`: the next argument.
    Argument,
}

/// What an item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `c`
    Byte,
    /// `hd`
    Short,
    /// `hu`
    UShort,
    /// `d`
    Int,
    /// `u`
    UInt,
    /// `ld`
    Long,
    /// `lu`
    ULong,
    /// `f`
    Float,
    /// `lf`
    Double,
    /// `x`
    Complex,
    /// `lx`
    DoubleComplex,
    /// `s`
    Text,
}

/// One thing that a format asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    /// `%+` at the beginning: an encoding, to start a new send buffer with.
    Begin,
    /// Data.
    Data {
        /// What.
        kind: Kind,
        /// How many; `None` for one, which `pvm_packf` takes by value.
        count: Option<Number>,
        /// How far apart.
        stride: Option<Number>,
    },
}

/// Reads a format piece by piece.
pub(crate) struct Format<'a> {
    text: &'a [u8],
    at_start: bool,
}

impl<'a> Format<'a> {
    /// A reader at the beginning.
    pub(crate) fn new(text: &'a [u8]) -> Format<'a> {
        Format {
            text,
            at_start: true,
        }
    }

    fn next_byte(&mut self) -> Option<u8> {
        let (first, rest) = self.text.split_first()?;
        self.text = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<Number> {
        if let Some(rest) = self.text.strip_prefix(b"*") {
            self.text = rest;
            return Some(Number::Argument);
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
        (digits > 0).then(|| Number::Is(number.iter().fold(0, add)))
    }

    fn data(&mut self) -> PvmResult<Item> {
        let count = self.number();
        let stride = match self.text.strip_prefix(b".") {
            Some(rest) => {
                self.text = rest;
                self.number()
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
                // `u` is a modifier in front of a conversion, and a conversion of its own at the end.
                (b'u', ..) => {
                    unsigned = true;
                    if self.text.first().is_some_and(|byte| b"dlh".contains(byte)) {
                        continue;
                    }
                    Self::integer(long, short, true)
                }
                (b'd', ..) => Self::integer(long, short, unsigned),
                (b'c', ..) => Kind::Byte,
                (b'f', false, ..) => Kind::Float,
                (b'f', true, ..) => Kind::Double,
                (b'x', false, ..) => Kind::Complex,
                (b'x', true, ..) => Kind::DoubleComplex,
                (b's', ..) => Kind::Text,
                _ => return Err(PvmError::BadParam),
            };
            return Ok(Item::Data {
                kind,
                count,
                stride,
            });
        }
    }

    fn integer(long: bool, short: bool, unsigned: bool) -> Kind {
        match (long, short, unsigned) {
            (true, _, false) => Kind::Long,
            (true, _, true) => Kind::ULong,
            (_, true, false) => Kind::Short,
            (_, true, true) => Kind::UShort,
            (_, _, false) => Kind::Int,
            (_, _, true) => Kind::UInt,
        }
    }
}

impl Iterator for Format<'_> {
    type Item = PvmResult<Item>;

    fn next(&mut self) -> Option<PvmResult<Item>> {
        let first = std::mem::take(&mut self.at_start);
        if first && let Some(rest) = self.text.strip_prefix(b"%+") {
            self.text = rest;
            return Some(Ok(Item::Begin));
        }
        loop {
            if self.next_byte()? == b'%' {
                return Some(self.data());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(text: &str) -> Vec<PvmResult<Item>> {
        Format::new(text.as_bytes()).collect()
    }

    fn one(kind: Kind) -> PvmResult<Item> {
        Ok(Item::Data {
            kind,
            count: None,
            stride: None,
        })
    }

    #[test]
    fn every_conversion_is_known() {
        assert_eq!(
            items("%+ %d %hd, %ld%u%hu%lu"),
            [
                Ok(Item::Begin),
                one(Kind::Int),
                one(Kind::Short),
                one(Kind::Long),
                one(Kind::UInt),
                one(Kind::UShort),
                one(Kind::ULong),
            ]
        );
        assert_eq!(
            items("%f%lf%x%lx%s%c%ud"),
            [
                one(Kind::Float),
                one(Kind::Double),
                one(Kind::Complex),
                one(Kind::DoubleComplex),
                one(Kind::Text),
                one(Kind::Byte),
                one(Kind::UInt),
            ]
        );
    }

    #[test]
    fn counts_and_strides_are_numbers_or_arguments() {
        let data = |count, stride| {
            Ok(Item::Data {
                kind: Kind::Int,
                count,
                stride,
            })
        };
        assert_eq!(
            items("%10.2d"),
            [data(Some(Number::Is(10)), Some(Number::Is(2)))]
        );
        assert_eq!(
            items("%*.*d"),
            [data(Some(Number::Argument), Some(Number::Argument))]
        );
        assert_eq!(items("%.3d"), [data(None, Some(Number::Is(3)))]);
    }

    #[test]
    fn bad_conversions_are_errors_and_other_text_is_not() {
        assert_eq!(items("hello"), []);
        assert_eq!(items("%q"), [Err(PvmError::BadParam)]);
        assert_eq!(items("%"), [Err(PvmError::BadParam)]);
        assert_eq!(items("x%+"), [Err(PvmError::BadParam)]);
    }
}
