//! Decodes the messages of images strictly. A message may contain only the fields of its schema,
//! each with the right type, in the right range, and not more often than the schema allows. Then
//! CRIU, which decodes the same bytes with another library, cannot see other values.
//!
//! The task is frozen meanwhile. The general decoder of the crate `protobuf` took fifteen times as
//! long for fields without a type, and does not report where a field is ambiguous.

use super::violation::ImageViolation;

/// Wire types of protobuf: how a value is encoded.
const WIRE_VARINT: u64 = 0;
const WIRE_FIXED64: u64 = 1;
const WIRE_BYTES: u64 = 2;
/// Maximum length in bytes of a varint of 64 bits.
const VARINT_BYTES_MAX: u32 = 10;

/// The type of a field.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Bool,
    U32,
    /// A number of 32 bits that may be negative, encoded as a varint.
    I32,
    U64,
    /// A number that may be negative, encoded with a zigzag.
    Zigzag,
    Fixed64,
    Bytes,
    Message(&'static Schema),
}

/// How often a field occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occurrence {
    Required,
    Optional,
    Repeated,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub(super) number: u32,
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) occurrence: Occurrence,
}

/// The fields of a message. The names of messages and fields are those of CRIU's `images/*.proto`.
#[derive(Debug)]
pub(super) struct Schema {
    pub(super) name: &'static str,
    pub(super) fields: &'static [Field],
}

#[derive(Clone, Debug)]
enum Value {
    /// A number. Negative numbers are in two's complement.
    Number(u64),
    Bytes(Vec<u8>),
    Message(Message),
}

/// A message that was decoded by its schema.
#[derive(Clone, Debug)]
pub(super) struct Message {
    schema: &'static Schema,
    /// Pairs of field number and value. The values of a repeated field are in order.
    values: Vec<(u32, Value)>,
}

impl Message {
    /// Decodes a message of the image `image`.
    pub(super) fn decode(
        schema: &'static Schema,
        bytes: &[u8],
        image: &str,
    ) -> Result<Self, ImageViolation> {
        let damaged = || ImageViolation::Damaged {
            image: image.into(),
            why: format!("a {} ends in the middle", schema.name),
        };
        let mut values = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let key = take_varint(&mut rest).ok_or_else(damaged)?;
            let number = u32::try_from(key >> 3).unwrap_or(u32::MAX);
            let invalid_field = || ImageViolation::UnknownField {
                image: image.into(),
                message: schema.name,
                field: number,
            };
            let field = schema.fields.iter().find(|field| field.number == number);
            let field = field.ok_or_else(invalid_field)?;
            let is_repeated = field.occurrence == Occurrence::Repeated;
            if !is_repeated && values.iter().any(|(other, _)| *other == number) {
                return Err(invalid_field());
            }
            let value = match (field.kind, key & 7) {
                (Kind::Message(schema), WIRE_BYTES) => {
                    let bytes = take_bytes(&mut rest).ok_or_else(damaged)?;
                    Value::Message(Self::decode(schema, bytes, image)?)
                }
                (Kind::Bytes, WIRE_BYTES) => {
                    Value::Bytes(take_bytes(&mut rest).ok_or_else(damaged)?.to_vec())
                }
                (Kind::Fixed64, WIRE_FIXED64) => {
                    let (number, remainder) = rest.split_first_chunk().ok_or_else(damaged)?;
                    rest = remainder;
                    Value::Number(u64::from_le_bytes(*number))
                }
                (kind, WIRE_VARINT) => {
                    let varint = take_varint(&mut rest).ok_or_else(damaged)?;
                    Value::Number(number_of(kind, varint).ok_or_else(invalid_field)?)
                }
                _ => return Err(invalid_field()),
            };
            values.push((number, value));
        }
        let message = Self { schema, values };
        let is_missing = |field: &&Field| {
            field.occurrence == Occurrence::Required && message.value(field.number).is_none()
        };
        match schema.fields.iter().find(is_missing) {
            None => Ok(message),
            Some(field) => Err(ImageViolation::Damaged {
                image: image.into(),
                why: format!("a {} has no {}", schema.name, field.name),
            }),
        }
    }

    fn value(&self, number: u32) -> Option<&Value> {
        self.values
            .iter()
            .find(|(other, _)| *other == number)
            .map(|(_, value)| value)
    }

    fn values_of(&self, name: &str) -> impl Iterator<Item = &Value> {
        let field = self.schema.fields.iter().find(|field| field.name == name);
        let number = field.expect("the schema has the field").number;
        self.values
            .iter()
            .filter(move |(other, _)| *other == number)
            .map(|(_, value)| value)
    }

    /// Returns the number in a field; `None` if the field is absent.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.numbers(name).next()
    }

    /// Returns the number in a required field.
    pub(super) fn required(&self, name: &str) -> u64 {
        self.number(name).expect("the field is required")
    }

    /// Returns the numbers in a repeated field.
    pub(super) fn numbers(&self, name: &str) -> impl Iterator<Item = u64> {
        self.values_of(name).filter_map(|value| match value {
            Value::Number(number) => Some(*number),
            _ => None,
        })
    }

    /// Returns the number in a field whose values may be negative; `None` if the field is absent.
    pub(super) fn signed(&self, name: &str) -> Option<i64> {
        self.number(name).map(u64::cast_signed)
    }

    /// True if the field is present and true.
    pub(super) fn flag(&self, name: &str) -> bool {
        self.number(name) == Some(1)
    }

    pub(super) fn is_present(&self, name: &str) -> bool {
        self.values_of(name).next().is_some()
    }

    /// Returns the bytes in a field; `None` if the field is absent.
    pub(super) fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.values_of(name).find_map(|value| match value {
            Value::Bytes(bytes) => Some(&**bytes),
            _ => None,
        })
    }

    /// Returns the message in a field; `None` if the field is absent.
    pub(super) fn message(&self, name: &str) -> Option<&Self> {
        self.messages(name).next()
    }

    /// Returns the number of embedded messages, and of fields with bytes.
    pub(super) fn message_count(&self) -> usize {
        let is_number = |value: &Value| matches!(value, Value::Number(_));
        let others = self.values.iter().filter(|(_, value)| !is_number(value));
        others.count()
    }

    /// Returns the messages in a repeated field.
    pub(super) fn messages(&self, name: &str) -> impl Iterator<Item = &Self> {
        self.values_of(name).filter_map(|value| match value {
            Value::Message(message) => Some(message),
            _ => None,
        })
    }
}

/// Removes a varint from the front of `bytes`; `None` if it is truncated or has more than 64 bits.
fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for index in 0..VARINT_BYTES_MAX {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let bits = u64::from(byte & 0x7f);
        if bits.leading_zeros() < 7 * index {
            return None;
        }
        number |= bits << (7 * index);
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// Removes bytes with their length from the front of `bytes`; `None` if they are truncated.
fn take_bytes<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(take_varint(bytes)?).ok()?;
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

/// Converts a varint to the number in a field; `None` if the number is out of range. CRIU's library
/// would truncate such a number.
fn number_of(kind: Kind, varint: u64) -> Option<u64> {
    match kind {
        Kind::Bool => (varint <= 1).then_some(varint),
        Kind::U32 => (varint <= u64::from(u32::MAX)).then_some(varint),
        Kind::I32 => i32::try_from(varint.cast_signed())
            .is_ok()
            .then_some(varint),
        Kind::U64 => Some(varint),
        Kind::Zigzag => Some((varint >> 1) ^ (varint & 1).wrapping_neg()),
        Kind::Fixed64 | Kind::Bytes | Kind::Message(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INNER: Schema = Schema {
        name: "inner",
        fields: &[field(1, "number", Kind::U32, Occurrence::Required)],
    };
    const OUTER: Schema = Schema {
        name: "outer",
        fields: &[
            field(1, "bool", Kind::Bool, Occurrence::Optional),
            field(2, "small", Kind::U32, Occurrence::Optional),
            field(3, "negative", Kind::I32, Occurrence::Optional),
            field(4, "zigzag", Kind::Zigzag, Occurrence::Optional),
            field(5, "list", Kind::U64, Occurrence::Repeated),
            field(6, "text", Kind::Bytes, Occurrence::Optional),
            field(7, "inner", Kind::Message(&INNER), Occurrence::Optional),
        ],
    };

    const fn field(number: u32, name: &'static str, kind: Kind, occurrence: Occurrence) -> Field {
        Field {
            number,
            name,
            kind,
            occurrence,
        }
    }

    fn decode(bytes: &[u8]) -> Result<Message, ImageViolation> {
        Message::decode(&OUTER, bytes, "x.img")
    }

    #[test]
    fn values_of_each_kind_are_decoded() {
        let minus_one = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
        let bytes = [
            &[1 << 3, 1, 2 << 3, 0xff, 0xff, 0xff, 0xff, 0x0f, 3 << 3][..],
            &minus_one,
            &[4 << 3, 3, 5 << 3, 7, 5 << 3, 8, 6 << 3 | 2, 1, b'x'],
            &[7 << 3 | 2, 2, 1 << 3, 9],
        ];
        let message = decode(&bytes.concat()).expect("valid");
        assert!(message.flag("bool"));
        assert_eq!(message.number("small"), Some(u64::from(u32::MAX)));
        assert_eq!(message.signed("negative"), Some(-1));
        assert_eq!(message.signed("zigzag"), Some(-2));
        assert_eq!(message.numbers("list").collect::<Vec<_>>(), [7, 8]);
        assert_eq!(message.bytes("text"), Some(&b"x"[..]));
        let inner = message.message("inner").expect("present");
        assert_eq!(inner.required("number"), 9);
        assert!(!decode(&[]).expect("valid").is_present("inner"));
    }

    /// Returns field 5 with a number of `continued_bytes` zeros that another byte follows, and of
    /// that last byte.
    fn varint_field(continued_bytes: usize, last_byte: u8) -> Vec<u8> {
        let zeros = vec![0x80; continued_bytes];
        [&[5 << 3][..], &zeros, &[last_byte]].concat()
    }

    #[test]
    fn ambiguous_messages_are_refused() {
        for (case, bytes) in [
            ("unknown field", &[8 << 3, 1][..]),
            ("repeated field", &[2 << 3, 1, 2 << 3, 1]),
            (
                "repeated message",
                &[7 << 3 | 2, 2, 8, 9, 7 << 3 | 2, 2, 8, 9],
            ),
            (
                "number above 32 bits",
                &[2 << 3, 0x80, 0x80, 0x80, 0x80, 0x10],
            ),
            ("-1 in 32 bits", &[3 << 3, 0xff, 0xff, 0xff, 0xff, 0x0f]),
            ("other bool", &[1 << 3, 2]),
            ("packed list", &[5 << 3 | 2, 1, 7]),
            ("number in place of text", &[6 << 3, 1]),
            ("fixed number", &[2 << 3 | 5, 1, 0, 0, 0]),
            ("group", &[2 << 3 | 3, 2 << 3 | 4]),
        ] {
            let error = decode(bytes).expect_err(case);
            assert!(
                matches!(error, ImageViolation::UnknownField { .. }),
                "{case}: {error}"
            );
        }
        for (case, bytes) in [
            ("truncated", &[2 << 3][..]),
            ("truncated text", &[6 << 3 | 2, 2, b'x']),
            ("varint of 65 bits", &varint_field(9, 2)),
            ("varint of 11 bytes", &varint_field(10, 0)),
            ("required field absent", &[7 << 3 | 2, 0]),
        ] {
            let error = decode(bytes).expect_err(case);
            assert!(
                matches!(error, ImageViolation::Damaged { .. }),
                "{case}: {error}"
            );
        }
    }
}
