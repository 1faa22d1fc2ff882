//! Packs and reads message contents: PVM items, or one value of any type that serde supports.

use crate::error::Error;
use crate::vm::{Body, Vm};
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::{Message, PvmError};
use serde::Serialize;
use serde::de::DeserializeOwned;

impl Body {
    /// Packs PVM items in XDR, the encoding that every host reads. C and Fortran programs unpack
    /// the items one at a time.
    ///
    /// ```
    /// use libpvm::Body;
    ///
    /// let body = Body::items(|out| {
    ///     out.pack_int(3).pack_items([1.5f64, 2.5, 3.5]).pack_str(b"three numbers")
    /// });
    /// assert_eq!(body.bytes.len(), 4 + 3 * 8 + 4 + 16);
    /// ```
    pub fn items(pack: impl FnOnce(&mut Packer) -> &mut Packer) -> Self {
        let mut out = Packer::new(Encoding::Xdr);
        pack(&mut out);
        out.into()
    }

    /// Packs a value of any type that serde can serialize; [`Content::value`] reads the value. C
    /// programs read the packed value as an `int` count followed by that number of bytes.
    ///
    /// # Errors
    /// [`PvmError::BadParam`] if the type cannot be serialized, [`PvmError::Overflow`] above 2 GiB.
    pub fn value<T: Serialize + ?Sized>(value: &T) -> Result<Self, Error> {
        let bytes = postcard::to_allocvec(value).map_err(|error| {
            Error::new(
                PvmError::BadParam,
                format!("the value cannot be packed: {error}"),
            )
        })?;
        let byte_count = i32::try_from(bytes.len()).map_err(|_| {
            Error::new(
                PvmError::Overflow,
                "the value is larger than 2 GiB: send it in several messages",
            )
        })?;
        Ok(Self::items(|out| {
            out.pack_int(byte_count).pack_bytes(&bytes)
        }))
    }
}

/// Reads the content of a message.
pub trait Content {
    /// Returns a reader of the PVM items in this message.
    ///
    /// # Errors
    /// [`PvmError::BadMsg`] if this host cannot read the encoding.
    fn items(&self) -> Result<Unpacker, Error>;

    /// Returns the value that the sender packed with [`Body::value`].
    ///
    /// # Errors
    /// [`PvmError::BadMsg`] if the message does not contain exactly one such value of type `T`.
    fn value<T: DeserializeOwned>(&self) -> Result<T, Error>;
}

impl Content for Message {
    fn items(&self) -> Result<Unpacker, Error> {
        Vm::unpack(self)
    }

    fn value<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let bad_message_error = |detail: String| {
            let reason = format!(
                "the message from {} with tag {} holds no such value: {detail}",
                self.src, self.tag
            );
            Error::new(PvmError::BadMsg, reason)
        };
        let mut unpacker = self.items()?;
        let bytes = unpacker
            .read_int()
            .and_then(|byte_count| {
                unpacker.read_bytes(usize::try_from(byte_count).map_err(|_| PvmError::BadMsg)?)
            })
            .map_err(|error| bad_message_error(error.to_string()))?;
        match postcard::take_from_bytes(&bytes) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(bad_message_error(format!(
                "{} bytes are left over",
                rest.len()
            ))),
            Err(error) => Err(bad_message_error(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Tid;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct SampleValue {
        name: String,
        range: (u64, u64),
        weights: Vec<f64>,
    }

    fn message_with_body(body: Body) -> Message {
        let (src, dst) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        Message {
            src,
            dst,
            ctx: 0,
            tag: 3,
            wid: 0,
            enc: body.enc,
            body: body.bytes,
        }
    }

    fn sample_value() -> SampleValue {
        SampleValue {
            name: "x".into(),
            range: (1, u64::MAX),
            weights: vec![0.5, -1.0],
        }
    }

    /// A packed value is read back unchanged. Read as PVM items, its message contains a byte count
    /// and that number of bytes.
    #[test]
    fn value_survives_round_trip() {
        let message = message_with_body(Body::value(&sample_value()).expect("packed"));
        assert_eq!(message.value::<SampleValue>(), Ok(sample_value()));
        let mut items = message.items().expect("readable");
        let byte_count = items.read_int().expect("a count");
        assert_eq!(
            items.read_bytes(byte_count as usize).expect("bytes").len(),
            byte_count as usize,
            "C reads it as bytes"
        );
        assert_eq!(items.remaining(), 0);
    }

    /// Reading a value fails if the message contains other items, more bytes, or an impossible
    /// count.
    #[test]
    fn content_that_is_not_the_value_is_rejected() {
        let text_message =
            message_with_body(Body::items(|out| out.pack_str(b"not a value at all")));
        assert_eq!(
            text_message
                .value::<SampleValue>()
                .expect_err("no value")
                .code,
            PvmError::BadMsg
        );
        let oversized_message =
            message_with_body(Body::value(&(sample_value(), 1u8)).expect("packed"));
        let error = oversized_message
            .value::<SampleValue>()
            .expect_err("too long");
        assert_eq!(
            error.reason,
            "the message from t40001 with tag 3 holds no such value: 1 bytes are left over"
        );
        for body in [
            Body::empty(),
            Body::items(|out| out.pack_int(-1)),
            Body::items(|out| out.pack_int(i32::MAX)),
        ] {
            assert!(message_with_body(body).value::<SampleValue>().is_err());
        }
    }
}
