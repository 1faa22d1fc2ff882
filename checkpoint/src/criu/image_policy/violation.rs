//! The reasons why images are not restored.

use sempa_proto::migration::{Failure, Refusal};
use std::path::PathBuf;
use thiserror::Error;

/// The first property of images that a restore by root must not accept. Nothing was restored.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ImageViolation {
    #[error("the directory contains {name:?}, which is not an image of a task")]
    UnknownImage { name: String },
    #[error("the image {image} cannot be read: {why}")]
    Unreadable { image: String, why: String },
    #[error("the image {image} is damaged: {why}")]
    Damaged { image: String, why: String },
    #[error("the image {image} has an unknown or ambiguous field ({message}, field {field})")]
    UnknownField {
        image: String,
        message: &'static str,
        field: u32,
    },
    #[error("process {pid} would have the {field} {found}, but tasks of this user have {expected}")]
    OtherUser {
        pid: u32,
        /// The user id that differs (`real user id`, …).
        field: &'static str,
        found: u32,
        expected: u32,
    },
    #[error("process {pid} would have the {field} {found}, but tasks of this user have {expected}")]
    OtherGroup {
        pid: u32,
        /// The group id that differs (`real group id`, …).
        field: &'static str,
        found: u32,
        expected: u32,
    },
    #[error(
        "process {pid} would have the supplementary group {gid}, to which this user does not belong here"
    )]
    ForeignGroup { pid: u32, gid: u32 },
    #[error("process {pid} would have capabilities ({set})")]
    Capabilities { pid: u32, set: &'static str },
    #[error("process {pid} would have the security bits {bits:#x}")]
    SecureBits { pid: u32, bits: u32 },
    #[error(
        "process {pid} could gain privileges by a set-user-id program, and tasks must not (no_new_privs)"
    )]
    NewPrivileges { pid: u32 },
    #[error("process {pid} would have a profile of a security module")]
    SecurityProfile { pid: u32 },
    #[error(
        "process {pid} would have the limit {limit} {found}, and this user has at most {allowed}"
    )]
    ResourceLimit {
        pid: u32,
        /// Name of the limit (`RLIMIT_NPROC`, …).
        limit: &'static str,
        found: u64,
        allowed: u64,
    },
    #[error("process {pid} would have {what}, which users cannot have")]
    Privilege { pid: u32, what: String },
    #[error("the images create a namespace ({namespace})")]
    Namespace { namespace: &'static str },
    #[error("process {pid} would have another root directory than /")]
    RootDirectory { pid: u32 },
    #[error("a process would have {kind}, which is not restored")]
    FileKind { kind: String },
    #[error("the file {} would be opened with flags that are not permitted ({flags:#o})", .path.display())]
    FileFlags { path: PathBuf, flags: u32 },
    #[error("the images name the file {path:?}, which is not the plain absolute path of a file")]
    FilePath { path: String },
    #[error("{what} would belong to user {uid} and group {gid}, not to the task's user")]
    ForeignOwner { what: String, uid: u32, gid: u32 },
    #[error("{what} would have the mode {mode:#o}")]
    SpecialMode { what: String, mode: u32 },
    #[error("a socket would be bound to the port {port}, which needs root")]
    PrivilegedPort { port: u32 },
    #[error("the process tree is not valid: {why}")]
    ProcessTree { why: String },
    #[error("the memory of process {pid} is not valid: {why}")]
    Memory { pid: u32, why: String },
    #[error("the images contain more than {limit} {what}")]
    TooMany { what: &'static str, limit: u64 },
    #[error("the user cannot open the file {} here in the way in which the task has opened it: {why}", .path.display())]
    Access { path: PathBuf, why: String },
    #[error("the access of the user cannot be checked: {why}")]
    AccessCheck { why: String },
}

impl From<ImageViolation> for Failure {
    fn from(violation: ImageViolation) -> Self {
        let text = violation.to_string();
        match violation {
            ImageViolation::OtherUser {
                found, expected, ..
            } => Self::Refused(vec![Refusal::OtherUser { found, expected }]),
            ImageViolation::Unreadable { .. } | ImageViolation::AccessCheck { .. } => {
                Self::Io(text)
            }
            ImageViolation::Damaged { .. } => Self::Images(text),
            ImageViolation::Access { path, why } => {
                Self::Refused(vec![Refusal::File { path, why }])
            }
            _ => Self::Refused(vec![Refusal::ForbiddenImages { why: text }]),
        }
    }
}
