//! Names of cargo packages that an installation builds. The launcher of `cargo xtask` includes this
//! file too, so it uses no other crate.

/// Packages that build the installed programs and libraries.
pub(crate) const INSTALLED_PACKAGES: [&str; 12] = [
    "pvm-console",
    "pvmd",
    "pvm-rm",
    "pvm-load-watcher",
    "pvm-tasker",
    "pvm-admin",
    "pvm3-capi",
    "gpvm3",
    "pvmgs",
    "pvm-broker",
    "sempa-work-capi",
    "sempa-broker-capi",
];
