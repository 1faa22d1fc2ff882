//! Dumps a real task of another user with CRIU, as the tasker does: root's CRIU runs in the PID and
//! the mount namespace of the task. The images must be accepted, also after a way through sealing.

use checkpoint::criu::Criu;
use checkpoint::criu::image_policy::{
    FileAccess, ImageViolation, OpenedFile, RestoreLimits, RestorePolicy, UserIdentity,
    check_access_as_user, verify_images,
};
use checkpoint::seal::{SealContext, SiteKeys, UnsealLimits, seal_images, unseal_images};
use sempa_proto::Tid;
use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const UID: u32 = 65534;
const GROUP: u32 = 100;

/// Runs as the init of the namespaces. Arguments: CRIU, the library, the image directory. CRIU does
/// not dump descriptors that were opened in another mount namespace.
const DUMP_SCRIPT: &str = r#"
cd /
for fd in /proc/self/fd/*; do
    fd=${fd##*/}
    [ "$fd" -le 2 ] || eval "exec $fd<&-"
done
setsid setpriv --reuid 65534 --regid 65534 --groups 100 --no-new-privs sleep 1000 \
    </dev/null >/dev/null 2>&1 &
task=$!
until [ "$(cat /proc/$task/comm)" = sleep ]; do sleep 0.01; done
LD_PRELOAD=$2 "$1" dump -t $task -D "$3" -o dump.log -v4 --network-lock skip \
    --manage-cgroups=ignore </dev/null
"#;

/// Root without CAP_SYS_RESOURCE may read the limits of a process only with its real ids.
const LIBRARY_SOURCE: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
long syscall(long number, ...) {
    long (*next)(long, ...) = dlsym(RTLD_NEXT, "syscall");
    va_list list;
    va_start(list, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    char path[32];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%ld", a[0]);
    int is_limit = number == SYS_prlimit64 && stat(path, &status) == 0;
    if (is_limit) {
        next(SYS_setregid, status.st_gid, -1);
        next(SYS_setreuid, status.st_uid, -1);
    }
    long result = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (is_limit) {
        next(SYS_setreuid, 0, -1);
        next(SYS_setregid, 0, -1);
    }
    return result;
}
"#;

fn private_dir() -> tempfile::TempDir {
    tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .expect("a directory")
}

fn dump_task(image_dir: &Path) {
    let build_dir = private_dir();
    let source = build_dir.path().join("limits.c");
    let library = build_dir.path().join("limits.so");
    std::fs::write(&source, LIBRARY_SOURCE).expect("written");
    let compiled = Command::new("gcc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .status();
    assert!(compiled.expect("gcc is installed").success());
    let criu = Criu::locate(|name| std::env::var_os(name)).expect("CRIU is installed");
    let output = Command::new("timeout")
        .args([
            "--kill-after=5",
            "60",
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
        ])
        .args([
            "--mount",
            "--mount-proc",
            "bash",
            "-ec",
            DUMP_SCRIPT,
            "bash",
        ])
        .args([criu.program(), &library, image_dir])
        .output()
        .expect("started");
    let log = std::fs::read_to_string(image_dir.join("dump.log")).unwrap_or_default();
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("Error")).collect();
    assert!(output.status.success(), "{output:?} {errors:?}");
}

#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn dumped_task_of_user_is_accepted() {
    let dump_dir = private_dir();
    dump_task(dump_dir.path());
    let keys = SiteKeys::generate(Path::new("site.key")).expect("random");
    let context = SealContext {
        uid: UID,
        user_name: "nobody".into(),
        tid: Tid::from_raw(0x40001),
    };
    let mut stream = Vec::new();
    seal_images(dump_dir.path(), &mut stream, &keys, &context).expect("sealed");
    let image_dir = private_dir();
    let limits = UnsealLimits::default();
    unseal_images(&*stream, image_dir.path(), &keys, &context, &limits).expect("unsealed");

    let policy = |uid, groups| RestorePolicy {
        identity: UserIdentity {
            uid,
            gid: UID,
            groups,
        },
        limits: RestoreLimits::default(),
        requires_no_new_privs: true,
        bounding_set: u64::MAX,
        other_files: BTreeSet::new(),
    };
    let user_policy = policy(UID, vec![GROUP]);
    let files = verify_images(image_dir.path(), &user_policy).expect("harmless");
    check_access_as_user(&files, &user_policy.identity, None).expect("readable by everybody");
    let root_dir = OpenedFile {
        path: "/".into(),
        access: FileAccess::Enter,
    };
    assert!(files.files.contains(&root_dir), "{files:?}");
    let result = verify_images(image_dir.path(), &policy(UID - 1, vec![GROUP]));
    assert!(
        matches!(result, Err(ImageViolation::OtherUser { found: UID, .. })),
        "{result:?}"
    );
    let result = verify_images(image_dir.path(), &policy(UID, Vec::new()));
    assert!(
        matches!(result, Err(ImageViolation::ForeignGroup { gid: GROUP, .. })),
        "{result:?}"
    );
}
