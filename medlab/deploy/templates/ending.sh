# A container that ends with 0 is not started again, as it has to be where the run was saved before its end, by this
# node or for the sake of another.
case $status in
    0 | 130)
        status=0
        is ended "$steps" || status=143
        ;;
esac
