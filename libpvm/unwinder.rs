//! For the build scripts of the shared libraries: selects the unwinder that a library links.

/// Links the static unwinder of the compiler instead of the shared one, which Rust requests by
/// default. A task that loads the shared unwinder starts a tenth of a millisecond later, mostly
/// because the unwinder detects the processor's features.
pub(crate) fn link_static_unwinder() {
    let linker_dir = std::path::PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"))
        .join("unwinder");
    std::fs::create_dir_all(&linker_dir).expect("cargo's folder can be written");
    // The linker finds this script under the name of the shared unwinder; the script names the
    // static one.
    std::fs::write(linker_dir.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)\n")
        .expect("cargo's folder can be written");
    println!("cargo:rustc-link-search=native={}", linker_dir.display());
}
