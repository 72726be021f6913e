# Pinned packages with the digests that pip compares with what it downloads: awk -f hashed.awk requirements.sha256 PINS
FNR == NR { digests[$1] = digests[$1] " --hash=" $2; next }
/^[A-Za-z]/ {
    split($1, parts, "==")
    name = tolower(parts[1])
    sub(/\[.*\]/, "", name)
    gsub(/[_.]/, "-", name)
    print $0 digests[name "==" parts[2]]
}
