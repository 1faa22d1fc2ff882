//! Passes hostile images to the code that a tasker of the system runs as root before a restore:
//! sealed images to `checkpoint::seal`, unsealed images to `checkpoint::criu::image_policy`.

use checkpoint::criu::image_policy::{
    RestoreLimits, RestorePolicy, UserIdentity, verify_image_bytes,
};
use checkpoint::seal::{
    ImageSealer, SealContext, SealError, SiteKeys, UnsealLimits, unseal_images,
};
use sempa_proto::Tid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// User id of the task in the images that are altered.
const UID: u32 = 65534;
/// Maximum total length in bytes of the files that one input may create.
const IMAGE_BYTES_MAX: u64 = 1 << 20;
/// The image of the task's only thread.
const CORE_IMAGE: &str = "core-2.img";
/// Fields of user and group ids in `creds_entry` of CRIU's `images/creds.proto`.
const ID_FIELDS: std::ops::RangeInclusive<u64> = 1..=8;
/// Fields of `creds_entry` with capabilities that must be empty: inheritable, permitted, effective,
/// ambient.
const CAPABILITY_FIELDS: [u64; 4] = [9, 10, 11, 19];

/// Passes one input to both readers. `order` selects what is altered, and `body` how. Returns true
/// if the altered images of a task are accepted.
pub fn read_images(order: u8, body: &[u8]) -> bool {
    unseal_hostile_stream(order, body);
    verify_hostile_images(order, body)
}

struct Sealing {
    keys: SiteKeys,
    context: SealContext,
    /// A valid stream, which inputs alter.
    stream: Vec<u8>,
    /// Contains only the directory `images`.
    parent: PathBuf,
}

fn sealing() -> &'static Sealing {
    static SEALING: OnceLock<Sealing> = OnceLock::new();
    SEALING.get_or_init(|| {
        let keys = SiteKeys::generate(Path::new("site.key")).expect("the kernel gives bytes");
        let context = SealContext {
            uid: UID,
            user_name: "nobody".into(),
            tid: Tid::from_raw(0x40001),
        };
        let stream = seal_file(&keys, &context, "core-2.img", &[7; 50]);
        let name = format!("sempa-fuzz-{}", std::process::id());
        let parent = std::env::temp_dir().join(name);
        let mut builder = fs::DirBuilder::new();
        builder
            .mode(0o700)
            .create(&parent)
            .and_then(|()| builder.create(parent.join("images")))
            .expect("a directory");
        Sealing {
            keys,
            context,
            stream,
            parent,
        }
    })
}

/// Removes the directory in which inputs are unsealed. No other thread may read inputs meanwhile.
pub fn remove_directory() {
    let removed = fs::remove_dir(sealing().parent.join("images"))
        .and_then(|()| fs::remove_dir(&sealing().parent));
    removed.expect("no input has left a file");
}

fn seal_file(keys: &SiteKeys, context: &SealContext, name: &str, content: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    let mut sealer = ImageSealer::new(&mut stream, keys, context).expect("memory");
    sealer.add_file(name, content).expect("a valid name");
    sealer.finish().expect("memory");
    stream
}

/// Unseals a stream: the input itself, a valid stream of which the input changes bytes, or the
/// input as an authentic file. Only a valid stream may create files, and none outside of its
/// directory.
fn unseal_hostile_stream(order: u8, body: &[u8]) {
    let sealing = sealing();
    let (stream, is_valid) = match order % 4 {
        0 => (body.to_vec(), false),
        1 => {
            let stream = seal_file(&sealing.keys, &sealing.context, "a.img", body);
            (stream, true)
        }
        2 => {
            let length = sealing.stream.len().saturating_sub(body.len());
            (sealing.stream[..length].to_vec(), body.is_empty())
        }
        _ => alter(&sealing.stream, body),
    };
    let dir = sealing.parent.join("images");
    let limits = UnsealLimits {
        files_max: 4,
        image_bytes_max: IMAGE_BYTES_MAX,
    };
    let result = unseal_images(&*stream, &dir, &sealing.keys, &sealing.context, &limits);
    assert_eq!(result.is_ok(), is_valid, "{result:?}");
    let names = file_names(&dir);
    match result {
        Ok(size) => {
            assert_eq!(size.files, names.len());
            for name in names {
                fs::remove_file(dir.join(name)).expect("it was created");
            }
        }
        Err(SealError::DirectoryNotEmpty { .. }) => unreachable!("each input leaves it empty"),
        Err(_) => assert!(names.is_empty(), "{names:?}"),
    }
    assert_eq!(file_names(&sealing.parent), ["images"], "a file outside");
}

fn file_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| {
        let name = entry.expect("readable").file_name();
        name.to_string_lossy().into_owned()
    });
    entries.collect()
}

/// Replaces bytes: each three bytes of the input are an offset and a new value. Returns whether the
/// bytes are unchanged.
fn alter(original: &[u8], body: &[u8]) -> (Vec<u8>, bool) {
    let mut altered = original.to_vec();
    for change in body.chunks_exact(3) {
        let offset = usize::from(u16::from_le_bytes([change[0], change[1]])) % altered.len();
        altered[offset] = change[2];
    }
    let is_unchanged = altered == original;
    (altered, is_unchanged)
}

fn valid_images() -> &'static BTreeMap<String, Vec<u8>> {
    static IMAGES: OnceLock<BTreeMap<String, Vec<u8>>> = OnceLock::new();
    IMAGES.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../checkpoint/testdata/small-user-images");
        let names = file_names(&dir).into_iter();
        let images = names.filter(|name| name.ends_with(".img")).map(|name| {
            let image = fs::read(dir.join(&name)).expect("readable");
            (name, image)
        });
        images.collect()
    })
}

/// Verifies images of a real task of which the input changes one. If the images are accepted, the
/// only thread has the ids of the user and no capabilities. Returns true if they are accepted.
fn verify_hostile_images(order: u8, body: &[u8]) -> bool {
    let policy = RestorePolicy {
        identity: UserIdentity {
            uid: UID,
            gid: UID,
            groups: vec![100],
        },
        limits: RestoreLimits::default(),
        requires_no_new_privs: true,
        bounding_set: u64::MAX,
        other_files: BTreeSet::new(),
    };
    let mut images = valid_images().clone();
    // Every other input changes the credentials, of which most bytes matter.
    let name = match order % 2 {
        0 => CORE_IMAGE.to_string(),
        _ => {
            let index = usize::from(order / 2) % images.len();
            images.keys().nth(index).expect("in range").clone()
        }
    };
    let image = images.get_mut(&name).expect("it exists");
    match order / 2 % 4 {
        0 => *image = body.to_vec(),
        1 => image.extend_from_slice(body),
        2 => image.truncate(body.len() * 23),
        _ => *image = alter_credentials(image, body),
    }
    let is_accepted = verify_image_bytes(&images, &policy).is_ok();
    if is_accepted {
        assert_has_user_credentials(&images[CORE_IMAGE]);
    }
    is_accepted
}

/// Replaces bytes, most of them near the end of the image, where the credentials are.
fn alter_credentials(image: &[u8], body: &[u8]) -> Vec<u8> {
    const TAIL_BYTES: usize = 250;
    match body.first().is_some_and(|byte| byte % 4 != 0) {
        true => {
            let (front, tail) = image.split_at(image.len().saturating_sub(TAIL_BYTES));
            match tail.is_empty() {
                true => image.to_vec(),
                false => [front, &alter(tail, &body[1..]).0].concat(),
            }
        }
        false => alter(image, body).0,
    }
}

/// Reads the credentials as CRIU does: the last of several values counts, and numbers are truncated
/// to 32 bits.
fn assert_has_user_credentials(core: &[u8]) {
    let length = u32::from_le_bytes(core[8..12].try_into().expect("four")) as usize;
    let entry = &core[12..12 + length];
    let credentials = last_message(entry, 5).and_then(|thread| last_message(thread, 10));
    let fields = fields(credentials.expect("every thread has credentials"));
    for id_field in ID_FIELDS {
        let last = fields.iter().rev().find(|(field, ..)| *field == id_field);
        let (_, number, _) = last.expect("the id is required");
        assert_eq!(*number as u32, UID, "field {id_field}");
    }
    let capabilities = fields
        .iter()
        .filter(|(field, ..)| CAPABILITY_FIELDS.contains(field));
    for (field, number, bytes) in capabilities {
        assert!(*number as u32 == 0 && bytes.is_empty(), "field {field}");
    }
}

fn last_message(message: &[u8], field_number: u64) -> Option<&[u8]> {
    let fields = fields(message);
    let mut matching = fields.iter().filter(|(field, ..)| *field == field_number);
    matching.next_back().map(|(_, _, bytes)| *bytes)
}

/// Returns the fields of a protobuf message: field number, number, bytes.
fn fields(mut message: &[u8]) -> Vec<(u64, u64, &[u8])> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = take_varint(&mut message);
        let (number, bytes) = match key & 7 {
            0 => (take_varint(&mut message), &[][..]),
            1 => (0, take_bytes(&mut message, 8)),
            2 => {
                let length = take_varint(&mut message) as usize;
                (0, take_bytes(&mut message, length))
            }
            5 => (0, take_bytes(&mut message, 4)),
            wire_type => panic!("an accepted image has the wire type {wire_type}"),
        };
        fields.push((key >> 3, number, bytes));
    }
    fields
}

fn take_varint(message: &mut &[u8]) -> u64 {
    let mut number = 0;
    for shift in (0..70).step_by(7) {
        let byte = take_bytes(message, 1)[0];
        number |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte & 0x80 == 0 {
            return number;
        }
    }
    panic!("an accepted image has a number of more than ten bytes");
}

fn take_bytes<'a>(message: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = message.split_at(count);
    *message = rest;
    taken
}
