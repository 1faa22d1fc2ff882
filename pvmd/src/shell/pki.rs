//! The certificate authority of the virtual machine, and TLS settings that trust only this
//! authority.
//!
//! The master creates the authority when it starts; the authority's key never leaves the master's
//! memory. Every host gets one certificate with its name (`h<index>.<vm>.sempa`). The host uses
//! this certificate for incoming and outgoing connections. The name in the certificate of a peer
//! identifies the peer. The handshake fails for peers without a certificate of this authority.

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use sempa_proto::HostId;
use std::sync::Arc;
use thiserror::Error;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// Application protocol that both sides must offer in the handshake.
pub(crate) const ALPN: &[u8] = b"sempa/1";

/// Error: a certificate or a TLS setting could not be created. The daemon cannot run.
#[derive(Debug, Error)]
#[error("cannot set up the virtual machine's certificates: {0}")]
pub(crate) struct PkiError(String);

fn pki_error(e: impl std::fmt::Display) -> PkiError {
    PkiError(e.to_string())
}

/// The authority of one virtual machine. Only the master has an authority.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: Vec<u8>,
    vm: String,
}

/// Certificate and key of one host, and the certificate of the authority, with which the host
/// checks other hosts. All fields contain DER.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct HostCredentials {
    pub(crate) authority_certificate: Vec<u8>,
    pub(crate) certificate: Vec<u8>,
    /// The host's private key (PKCS #8).
    pub(crate) key: Vec<u8>,
}

/// Returns the DNS name in the certificate of `host`.
///
/// Characters of the virtual machine's name that DNS does not allow are replaced by `-`. Thereby
/// the hosts of two virtual machines may have the same DNS names. This is harmless, because the
/// authority's key identifies the virtual machine.
pub(crate) fn host_name(host: HostId, vm: &str) -> String {
    let label: String = vm
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() {
                c.to_ascii_lowercase()
            } else {
                '-'
            }
        })
        .collect();
    format!("h{}.v{label}v.sempa", host.index())
}

impl Authority {
    /// Creates an authority with a new key.
    ///
    /// # Errors
    /// The key cannot be generated.
    pub(crate) fn new(vm: &str) -> Result<Self, PkiError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished_name(&format!("Sempa virtual machine {vm}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(pki_error)?;
        let certificate = params.self_signed(&key).map_err(pki_error)?.der().to_vec();
        Ok(Self {
            issuer: Issuer::new(params, key),
            certificate,
            vm: vm.to_string(),
        })
    }

    /// Issues a certificate and a key for a host.
    ///
    /// # Errors
    /// The key cannot be generated, or the certificate cannot be signed.
    pub(crate) fn issue(&self, host: HostId) -> Result<HostCredentials, PkiError> {
        let mut params =
            CertificateParams::new(vec![host_name(host, &self.vm)]).map_err(pki_error)?;
        params.distinguished_name = distinguished_name(&host_name(host, &self.vm));
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate().map_err(pki_error)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(pki_error)?;
        Ok(HostCredentials {
            authority_certificate: self.certificate.clone(),
            certificate: certificate.der().to_vec(),
            key: key.serialize_der(),
        })
    }
}

fn distinguished_name(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    name
}

impl HostCredentials {
    fn tls_parts(
        &self,
    ) -> Result<
        (
            Arc<RootCertStore>,
            Vec<CertificateDer<'static>>,
            PrivateKeyDer<'static>,
        ),
        PkiError,
    > {
        let mut root_store = RootCertStore::empty();
        root_store
            .add(CertificateDer::from(self.authority_certificate.clone()))
            .map_err(pki_error)?;
        let certificate_chain = vec![CertificateDer::from(self.certificate.clone())];
        Ok((
            Arc::new(root_store),
            certificate_chain,
            PrivatePkcs8KeyDer::from(self.key.clone()).into(),
        ))
    }

    /// Returns TLS settings for incoming connections. Only peers with a certificate of this virtual
    /// machine are accepted.
    ///
    /// # Errors
    /// The certificates are inconsistent.
    pub(crate) fn server_config(&self) -> Result<QuicServerConfig, PkiError> {
        let (roots, certificate_chain, key) = self.tls_parts()?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(pki_error)?;
        let mut tls_config = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(pki_error)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(certificate_chain, key)
            .map_err(pki_error)?;
        tls_config.alpn_protocols = vec![ALPN.to_vec()];
        // Session tickets are disabled: a ticket would remain valid after its host has been
        // expelled.
        tls_config.send_tls13_tickets = 0;
        QuicServerConfig::try_from(tls_config).map_err(pki_error)
    }

    /// Returns TLS settings for outgoing connections. The caller must pass the expected host's name
    /// to the endpoint.
    ///
    /// # Errors
    /// The certificates are inconsistent.
    pub(crate) fn client_config(&self) -> Result<QuicClientConfig, PkiError> {
        let (roots, certificate_chain, key) = self.tls_parts()?;
        let mut tls_config = rustls::ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::ring::default_provider(),
        ))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(pki_error)?
        .with_root_certificates(roots)
        .with_client_auth_cert(certificate_chain, key)
        .map_err(pki_error)?;
        tls_config.alpn_protocols = vec![ALPN.to_vec()];
        QuicClientConfig::try_from(tls_config).map_err(pki_error)
    }
}

/// Returns TLS settings for outgoing connections without a certificate. They accept the daemons of
/// the authority with this certificate, which refuse the connection after they have proved their
/// identity.
///
/// # Errors
/// The certificate is damaged.
pub(crate) fn authority_client_config(certificate: &[u8]) -> Result<QuicClientConfig, PkiError> {
    let mut root_store = RootCertStore::empty();
    root_store
        .add(CertificateDer::from(certificate.to_vec()))
        .map_err(pki_error)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls_config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(pki_error)?
        .with_root_certificates(root_store)
        .with_no_client_auth();
    tls_config.alpn_protocols = vec![ALPN.to_vec()];
    QuicClientConfig::try_from(tls_config).map_err(pki_error)
}

/// Returns the host that a certificate names; `None` if the certificate names no host of this
/// virtual machine. The handshake must have accepted the certificate, because the signature is not
/// checked here.
pub(crate) fn host_of_certificate(certificate: &[u8], vm: &str) -> Option<HostId> {
    let (_, parsed_certificate) = X509Certificate::from_der(certificate).ok()?;
    let names = parsed_certificate.subject_alternative_name().ok()??;
    names.value.general_names.iter().find_map(|name| {
        let GeneralName::DNSName(name) = name else {
            return None;
        };
        let index = name.strip_prefix('h')?.split('.').next()?.parse().ok()?;
        let host = HostId::new(index)?;
        (host_name(host, vm) == *name).then_some(host)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_names_host_and_virtual_machine() {
        let host = HostId::new(17).expect("an index");
        for vm in ["pvm", "My_Own.vm", "-", "a..b"] {
            let authority = Authority::new(vm).expect("a key");
            let credentials = authority.issue(host).expect("a key");
            assert_eq!(
                host_of_certificate(&credentials.certificate, vm),
                Some(host),
                "{vm}"
            );
            assert_eq!(
                host_of_certificate(&credentials.certificate, "another"),
                None
            );
            assert!(credentials.server_config().is_ok() && credentials.client_config().is_ok());
        }
    }
}
