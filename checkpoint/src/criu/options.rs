//! Encodes requests to `criu swrk`.

use crate::engine::{DumpParams, RestoreParams, RestoreResources};
use protobuf::{EnumOrUnknown, Message, MessageField};
use rust_criu::rust_criu_protobuf::rpc::{
    Criu_cg_mode, Criu_network_lock_method, Criu_opts, Criu_req, Criu_req_type, Inherit_fd,
};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;

/// Key by which the images refer to the task's PID namespace (`external` at dump, `inherit_fd` at
/// restore).
const NAMESPACE_KEY: &str = "task";
/// Maximum size in bytes of a ghost file, that is, of a deleted file that is stored in the images.
const GHOST_FILE_BYTES_MAX: u32 = 1 << 30;
/// CRIU's log level "debug". Lower levels often omit the reason of a failure.
const LOG_LEVEL: i32 = 4;
/// Name of a log file by which CRIU writes its log to its standard output.
const STANDARD_OUTPUT: &str = "-";

fn common_options(image_dir: &Path) -> Criu_opts {
    let mut opts = Criu_opts::new();
    // The field is required. The engine is started before the directory exists, so it cannot
    // inherit a descriptor.
    opts.images_dir_fd = Some(-1);
    opts.images_dir = Some(image_dir.to_string_lossy().into_owned());
    opts.log_level = Some(LOG_LEVEL);
    opts.log_file = Some(STANDARD_OUTPUT.to_string());
    opts.notify_scripts = Some(true);
    opts.manage_cgroups_mode = Some(EnumOrUnknown::new(Criu_cg_mode::IGNORE));
    // Connections are never dumped. The other methods of locking the network need programs that may
    // not be installed.
    opts.network_lock = Some(EnumOrUnknown::new(Criu_network_lock_method::SKIP));
    opts.ghost_limit = Some(GHOST_FILE_BYTES_MAX);
    // The program file at the target may be a copy with other permissions.
    opts.skip_file_rwx_check = Some(true);
    opts
}

fn encode_request(request_type: Criu_req_type, opts: Criu_opts) -> Vec<u8> {
    let mut request = Criu_req::new();
    request.type_ = Some(EnumOrUnknown::new(request_type));
    request.opts = MessageField::some(opts);
    request.notify_success = Some(true);
    request
        .write_to_bytes()
        .expect("a request is small and has all its fields")
}

/// Encodes a request to dump a task and leave it stopped. `root_pid` is the PID of its root process
/// as CRIU sees it.
pub(super) fn encode_dump_request(params: &DumpParams, root_pid: i32) -> Vec<u8> {
    let mut opts = common_options(&params.dir);
    opts.pid = Some(root_pid);
    opts.leave_stopped = Some(true);
    // Inside the namespace, CRIU sees its own.
    if params.inside.is_none() {
        opts.external
            .push(format!("pid[{}]:{NAMESPACE_KEY}", params.pid_namespace));
    }
    encode_request(Criu_req_type::DUMP, opts)
}

/// Encodes a request to restore a task as a child of the caller, in the PID namespace of
/// `resources`. With `consume_images` CRIU frees the pages in the images after reading them
/// (`auto_dedup`).
pub(super) fn encode_restore_request(
    params: &RestoreParams,
    resources: &RestoreResources,
    consume_images: bool,
) -> Vec<u8> {
    let mut opts = common_options(&params.dir);
    opts.rst_sibling = Some(true);
    opts.auto_dedup = Some(consume_images);
    opts.lazy_pages = params.post_copy.then_some(true);
    let mut add_inherited_fd = |key: String, fd: RawFd| {
        let mut entry = Inherit_fd::new();
        entry.key = Some(key);
        entry.fd = Some(fd);
        opts.inherit_fd.push(entry);
    };
    if resources.inside.is_none() {
        add_inherited_fd(
            NAMESPACE_KEY.to_string(),
            resources.pid_namespace.as_raw_fd(),
        );
    }
    add_inherited_fd(
        format!("pipe:[{}]", params.external_resources.output_pipe),
        resources.output.as_raw_fd(),
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
