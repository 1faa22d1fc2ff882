//! Encodes requests to `criu swrk`.

use crate::engine::{DumpJob, RestoreJob};
use protobuf::{EnumOrUnknown, Message, MessageField};
use rust_criu::rust_criu_protobuf::rpc::{
    Criu_cg_mode, Criu_network_lock_method, Criu_opts, Criu_req, Criu_req_type, Inherit_fd,
};
use std::os::fd::{AsRawFd, RawFd};

/// Key by which the images refer to the task's PID namespace (`external` at dump, `inherit_fd` at
/// restore).
const NAMESPACE_KEY: &str = "task";
/// Maximum size of a deleted file that is stored in the images, in bytes.
const GHOST_BYTES_MAX: u32 = 1 << 30;
/// CRIU's log level "debug". Lower levels often omit the reason of a failure.
const LOG_LEVEL: i32 = 4;

fn common_options(images: RawFd, log: &str) -> Criu_opts {
    let mut opts = Criu_opts::new();
    opts.images_dir_fd = Some(images);
    opts.log_level = Some(LOG_LEVEL);
    opts.log_file = Some(log.to_string());
    opts.notify_scripts = Some(true);
    opts.manage_cgroups_mode = Some(EnumOrUnknown::new(Criu_cg_mode::IGNORE));
    // Connections are never dumped. The other methods of locking the network need programs that may
    // not be installed.
    opts.network_lock = Some(EnumOrUnknown::new(Criu_network_lock_method::SKIP));
    opts.ghost_limit = Some(GHOST_BYTES_MAX);
    // The program file at the target may be a copy with other permissions.
    opts.skip_file_rwx_check = Some(true);
    opts
}

fn encode_request(kind: Criu_req_type, opts: Criu_opts) -> Vec<u8> {
    let mut request = Criu_req::new();
    request.type_ = Some(EnumOrUnknown::new(kind));
    request.opts = MessageField::some(opts);
    request.notify_success = Some(true);
    request
        .write_to_bytes()
        .expect("a request is small and has all its fields")
}

/// Encodes a request to dump a task and leave it stopped.
pub(super) fn encode_dump_request(job: &DumpJob, images: RawFd, log: &str) -> Vec<u8> {
    let mut opts = common_options(images, log);
    opts.pid = Some(job.pid);
    opts.leave_stopped = Some(true);
    opts.external
        .push(format!("pid[{}]:{NAMESPACE_KEY}", job.pid_namespace));
    encode_request(Criu_req_type::DUMP, opts)
}

/// Encodes a request to restore a task, as a child of the caller, into the given PID namespace.
/// With `uses_up` CRIU frees the pages in the images after reading them (`auto_dedup`).
pub(super) fn encode_restore_request(
    job: &RestoreJob,
    images: RawFd,
    log: &str,
    uses_up: bool,
) -> Vec<u8> {
    let mut opts = common_options(images, log);
    opts.rst_sibling = Some(true);
    opts.auto_dedup = Some(uses_up);
    opts.lazy_pages = job.post_copy.then_some(true);
    let mut inherit = |key: String, fd: RawFd| {
        let mut entry = Inherit_fd::new();
        entry.key = Some(key);
        entry.fd = Some(fd);
        opts.inherit_fd.push(entry);
    };
    inherit(NAMESPACE_KEY.to_string(), job.pid_namespace.as_raw_fd());
    inherit(
        format!("pipe:[{}]", job.external.output_pipe),
        job.output.as_raw_fd(),
    );
    encode_request(Criu_req_type::RESTORE, opts)
}

/// Encodes the reply to a notification of CRIU.
pub(super) fn encode_acknowledgement(success: bool) -> Vec<u8> {
    let mut request = Criu_req::new();
    request.type_ = Some(EnumOrUnknown::new(Criu_req_type::NOTIFY));
    request.notify_success = Some(success);
    request
        .write_to_bytes()
        .expect("a request is small and has all its fields")
}
